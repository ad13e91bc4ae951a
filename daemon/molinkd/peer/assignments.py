"""Carries out what :mod:`molink.swarm.keeper` decides: fetches, workers, news."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from molink.checkpoint.folder import ModelFolder
from molink.errors import MolinkError
from molink.facts.footprint import Load, StageSetup
from molink.facts.memory_plan import MemoryPlan, plan_memory
from molink.facts.profile import MAX_CHUNK_ROWS
from molink.facts.settings import PipelineSettings
from molink.swarm.address_book import AddressBook
from molink.swarm.keeper import (
    Decision,
    Fetch,
    FromStage,
    Keeper,
    StartWorker,
    StopWorker,
    Tell,
    TellWorker,
)
from molink.wire.messages.control import (
    Assign,
    ControlMessage,
    Form,
    Prefetch,
    Prefetched,
    StageProfile,
    Unassign,
    WorkerState,
)
from molink.wire.messages.pipe import MemberBlocked, Start
from molink.wire.sockets.curve import KeyPair
from molinkd.peer.device_probe import Measured, worker_threads
from molinkd.peer.home import Home
from molinkd.peer.prefetcher import Prefetcher
from molinkd.peer.quantize import check_quantize
from molinkd.peer.settings import Settings
from molinkd.peer.store import FetchProgress, Store
from molinkd.peer.supervisor import Supervisor

log = logging.getLogger(__name__)


class Assignments:
    """The stages of this peer."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyPair,
        store: Store,
        book: AddressBook,
        home: Home,
        tell: Callable[[ControlMessage], None],
        on_change: Callable[[], None],
        on_blocked: Callable[[str, str, str], None],
    ) -> None:
        """``on_change`` is called whenever :meth:`states` may have changed.

        ``on_blocked`` is told where which member was cut off by a worker, and why.
        """
        self._settings = settings
        self._keys = keys
        self._store = store
        self._book = book
        self._home = home
        self._tell = tell
        self._on_change = on_change
        self._on_blocked = on_blocked
        self._keeper = Keeper()
        self._prefetcher = Prefetcher(store, on_change)
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._progress: dict[int, FetchProgress] = {}
        self._measured: asyncio.Future[Measured] = asyncio.get_running_loop().create_future()
        self.supervisor = Supervisor(home.logs, self._worker_said, self._worker_exited)

    def measured(self, device: Measured) -> None:
        """The device is known: stages may be started on it."""
        self._measured.set_result(device)

    def handle(self, message: Prefetch | Assign | StageProfile | Form | Unassign) -> None:
        """Take an order of the coordinator."""
        match message:
            case Prefetch():
                self._prefetcher.begin(message)
            case Assign():
                self._prefetcher.cancel()  # one transfer of a model at a time: now this one
                self._carry_out(self._keeper.assign(message))
            case StageProfile():
                self._keeper.profile(message)
            case Form():
                self._carry_out(self._keeper.form(message))
            case Unassign():
                self._carry_out(self._keeper.unassign(message.pipeline))

    def repeat(self) -> None:
        """Tell the coordinator again what it may have missed."""
        self._carry_out([*self._keeper.repeat()])

    def members_changed(self) -> None:
        """Tell the workers who may talk to them."""
        self.supervisor.tell_all(self._book.keys())

    def states(self) -> tuple[WorkerState, ...]:
        """All stages of this peer."""
        return self._keeper.states()

    @property
    def prefetched(self) -> Prefetched | None:
        """How far the files of a stage that is to be are."""
        return self._prefetcher.state

    def describe(self) -> str:
        """All stages, and how far transfers are, in one line for a person."""
        under_way = [f"{p}" for p in self._progress.values() if p.total]
        under_way += [text for text in (self._prefetcher.under_way,) if text]
        return " ".join([self._keeper.describe(), *under_way])

    async def close(self) -> None:
        """End transfers and workers."""
        await self._prefetcher.close()
        tasks = list(self._fetches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.supervisor.close()
        self._measured.cancel()

    # --- carrying out ---

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Fetch():
                    task = asyncio.get_running_loop().create_task(self._fetch(decision))
                    self._fetches[decision.generation] = task
                case StartWorker():
                    self._start(decision)
                case TellWorker(generation, message):
                    self.supervisor.tell(generation, message)
                case StopWorker(generation):
                    fetch = self._fetches.get(generation)
                    if fetch is not None:
                        fetch.cancel()
                    self.supervisor.stop(generation)
                case Tell(message):
                    self._tell(message)
        if decisions:
            self._on_change()

    async def _fetch(self, decision: Fetch) -> None:
        generation, assign = decision.generation, decision.assign
        progress = self._progress[generation] = FetchProgress()
        try:
            folder = await self._store.stage(assign.model, assign.layers, assign.sources, progress)
            start = await self._prepare(assign, folder)
        except MolinkError as error:
            log.warning("stage %d of %s: %s", assign.stage, assign.model, error)
            self._carry_out(self._keeper.failed(generation, str(error)))
        except Exception as error:
            log.exception("stage %d of %s", assign.stage, assign.model)
            self._carry_out(self._keeper.failed(generation, f"internal error: {error!r}"))
        else:
            self._carry_out(self._keeper.fetched(generation, start))
        finally:
            del self._fetches[generation], self._progress[generation]

    async def _prepare(self, assign: Assign, folder: Path) -> Start:
        opened = await asyncio.to_thread(ModelFolder.open, folder, assign.layers)
        measured = await asyncio.shield(self._measured)
        settings = self._settings
        check_quantize(assign.quantize, opened.config, measured.device.kind)
        plan = plan_stage(opened, assign, measured, settings.pipeline)
        log.info("layers %d:%d of %s: %s", *assign.layers, assign.model, plan)
        first, last = settings.worker_ports
        return Start(
            pipeline=assign.pipeline,
            stage=assign.stage,
            stages=assign.stages,
            layers=assign.layers,
            model_dir=str(folder),
            dtype=assign.dtype,
            device=measured.name,
            threads=worker_threads(settings) if measured.name == "cpu" else 0,
            public_key=self._keys.public,
            secret_key=self._keys.secret,
            bind=settings.host,
            ports=(first, last + 1),
            kv_bytes=plan.kv,
            block_size=assign.block_size,
            max_context=opened.config.context,
            settings=settings.pipeline,
            profile_cache=str(self._home.profiles),
            quantize=assign.quantize,
            memory=0 if measured.name == "cpu" else plan.budget,
        )

    def _start(self, decision: StartWorker) -> None:
        generation = decision.generation
        try:
            pid = self.supervisor.start(generation, decision.start, self._book.keys())
        except OSError as error:
            reason = f"can't start a worker: {error}"
            self._carry_out(self._keeper.failed(generation, reason))
        else:
            self._keeper.started(generation, pid)

    def _worker_said(self, generation: int, message: FromStage) -> None:
        if isinstance(message, MemberBlocked):
            log.warning("a stage of this PC has cut off %s: %s", message.peer, message.reason)
            self._on_blocked("a stage of this PC", message.peer, message.reason)
        self._carry_out(self._keeper.worker_said(generation, message))

    def _worker_exited(self, generation: int, reason: str) -> None:
        self._carry_out(self._keeper.failed(generation, reason))


def plan_stage(
    folder: ModelFolder, assign: Assign, measured: Measured, settings: PipelineSettings
) -> MemoryPlan:
    """How the device's memory is shared out for a stage.

    Raises:
        UsageError: it isn't enough; says what would fit.
    """
    target = StageSetup(
        kind=measured.device.kind,
        bf16=measured.bf16,
        dtype=assign.dtype,
        quantize=assign.quantize,
        load=Load(settings.chunk_tokens or MAX_CHUNK_ROWS, settings.max_running),
    )
    return plan_memory(
        folder.facts(assign.model),
        assign.layers,
        target,
        measured.device.memory,
        requests=settings.max_running,
        block_size=assign.block_size,
    )
