"""Carries out what :mod:`molink.swarm.agent.keeper` decides: fetches, workers, news."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from molink.errors import FilesMissing, MolinkError
from molink.facts.identity import peer_id
from molink.facts.model import LayerRange
from molink.swarm.agent.keeper import (
    Decision,
    Fetch,
    FromStage,
    Keeper,
    StartWorker,
    StopWorker,
    TellCoordinator,
    TellWorker,
    tells_more,
)
from molink.swarm.agent.recovery import Recovery
from molink.swarm.artifacts.supply import Supply
from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.instructions import (
    Assign,
    Form,
    Prefetch,
    StageAddress,
    StageProfile,
    Unassign,
)
from molink.wire.messages.pipe import Formed, Loaded, MemberBlocked, Start
from molink.wire.messages.reports import Prefetched, StageFailed, WorkerState
from molink.wire.sockets.curve import KeyPair
from molinkd.peer.agent.device_probe import Measured
from molinkd.peer.agent.preparation import NoRoomBesideError, Preparation
from molinkd.peer.agent.supervisor import Supervisor
from molinkd.peer.artifacts.prefetcher import Prefetcher
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.store import Store
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings

log = logging.getLogger(__name__)

#: Between two looks at whether workers live, in seconds.
WATCH_S = 0.5


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
        reaches: Callable[[StageAddress], Awaitable[bool]],
    ) -> None:
        """``on_change`` is called whenever :meth:`states` may have changed.

        ``on_blocked`` is told where which member was cut off by a worker, and why. ``reaches``
        says whether a stage's port can be reached from here.
        """
        self._settings = settings
        self._store = store
        self._book = book
        self._tell = tell
        self._on_change = on_change
        self._on_blocked = on_blocked
        self._reaches = reaches
        self._me = peer_id(keys.public)
        #: Rings that wait for their next stage to be reached, by pipeline.
        self._forming: dict[str, tuple[Form, asyncio.Task[None]]] = {}
        self._reaching: set[asyncio.Task[None]] = set()
        #: Who has the next stage, by pipeline; also of those that are over.
        self._after: dict[str, str] = {}
        self._paused = False
        self._keeper = Keeper()
        self.recovery = Recovery()
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._progress: dict[int, Progress] = {}
        self._preparation = Preparation(settings, keys, home, self.recovery)
        self.supervisor = Supervisor(home.logs, self._worker_said, self._worker_exited)
        self._prefetcher = Prefetcher(store, on_change, self.supervisor.quick)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def link_rates(self) -> dict[str, float]:
        """Bytes/s of the links from this PC's stages to the next ones, by peer; 0 if unknown."""
        rates = {
            pipeline: self.supervisor.gauge(pipeline, "link_rate_bytes_per_second")
            for pipeline in self._after
        }
        self._after = {one: self._after[one] for one, rate in rates.items() if rate is not None}
        return {peer: rates[one] or 0.0 for one, peer in self._after.items()}

    def measured(self, device: Measured) -> None:
        """The device is known: stages may be started on it."""
        self._preparation.measured(device)
        if self._wants_spare:
            self.supervisor.prepare()

    def pause(self, paused: bool) -> None:
        """No stage is to be here for a while, nor a spare for one; or again one may come."""
        self._paused = paused
        if paused:
            self.supervisor.drop_spare()
        elif self._wants_spare and self._preparation.is_measured:
            self.supervisor.prepare()

    @property
    def _wants_spare(self) -> bool:
        return self._settings.spare_worker and not self._paused

    def handle(self, message: Prefetch | Assign | StageProfile | Form | Unassign) -> None:
        """Take an order of the coordinator."""
        match message:
            case Prefetch():
                self._prefetcher.begin(message)
            case Assign():
                self.recovery.ended("decided", self._now())
                self._prefetcher.cancel()  # one transfer of a model at a time: now this one
                self._carry_out(self._keeper.assign(message))
            case StageProfile():
                self._keeper.profile(message)
            case Form():
                self.recovery.ended("others", self._now())
                self._form_soon(message)
            case Unassign():
                self._form_no_more(message.pipeline)
                self._carry_out(self._keeper.unassign(message.pipeline))

    def repeat(self) -> None:
        """Tell the coordinator again what it may have missed."""
        self._carry_out([*self._keeper.repeat()])

    def members_changed(self) -> None:
        """Tell the workers who may talk to them."""
        self.supervisor.tell_all(self._book.keys())

    def states(self) -> tuple[WorkerState, ...]:
        """All stages of this peer."""
        fetched = {number: (*p.shown, 0) for number, p in self._progress.items()}
        transfers = self.supervisor.loading() | fetched
        return self._keeper.states(transfers, self.supervisor.gauges("stage_decode_pace"))

    def layers(self) -> LayerRange:
        """Those that this peer holds; ``0:0`` if none."""
        return next((state.layers for state in self.states()), (0, 0))

    def holds(self, pipeline: str) -> bool:
        """Whether this peer has a stage of a pipeline."""
        return any(state.pipeline == pipeline for state in self.states())

    @property
    def prefetched(self) -> Prefetched | None:
        """How far the files of a stage that is to be are."""
        return self._prefetcher.state

    def describe(self) -> str:
        """All stages, and the one that is to be, in one line for a person."""
        return ", ".join(filter(None, (self._keeper.describe(), self._prefetcher.under_way)))

    async def close(self) -> None:
        """End transfers and workers."""
        await self._prefetcher.close()
        tasks = [self._watching, *self._fetches.values(), *self._reaching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.supervisor.close()
        self._preparation.close()

    # --- carrying out ---

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Fetch():
                    task = asyncio.get_running_loop().create_task(self._fetch(decision))
                    self._fetches[decision.generation] = task
                case StartWorker():
                    self.recovery.ended("files", self._now())
                    self._start(decision)
                case TellWorker(generation, message):
                    if isinstance(message, Start):
                        self.recovery.ended("files", self._now())
                    self.supervisor.tell(generation, message)
                case StopWorker(generation, kill):
                    self._preparation.over(generation)
                    fetch = self._fetches.get(generation)
                    if fetch is not None:
                        fetch.cancel()
                    self.supervisor.stop(generation, kill=kill)
                case TellCoordinator(message):
                    if isinstance(message, StageFailed):
                        self.recovery.noticed(self._now(), time.time())
                    self._tell(message)
        if any(tells_more(decision) for decision in decisions):
            self._on_change()

    async def _watch(self) -> None:
        while True:
            self._carry_out(self._keeper.watch(self._now()))
            await asyncio.sleep(WATCH_S)

    def _form_soon(self, order: Form) -> None:
        """Form the ring once the next stage has answered."""
        under_way = self._forming.get(order.pipeline)
        if under_way is None or under_way[0] != order:
            self._form_no_more(order.pipeline)
            task = asyncio.get_running_loop().create_task(self._form(order))
            self._forming[order.pipeline] = order, task
            self._reaching.add(task)
            task.add_done_callback(self._reaching.discard)

    def _form_no_more(self, pipeline: str) -> None:
        under_way = self._forming.pop(pipeline, None)
        if under_way is not None:
            under_way[1].cancel()

    async def _form(self, order: Form) -> None:
        places = [stage for stage, one in enumerate(order.ring) if one.peer == self._me]
        after = order.ring[(places[0] + 1) % len(order.ring)] if places else None
        if after is None or len(order.ring) == 1 or await self._reaches(after):
            del self._forming[order.pipeline]
            if after is not None:
                self._after[order.pipeline] = after.peer
            self._carry_out(self._keeper.form(order))
            return
        del self._forming[order.pipeline]
        at = ", ".join(after.addresses)
        self._tell(
            StageFailed(
                pipeline=order.pipeline,
                epoch=order.epoch,
                stage=places[0],
                reason=f"can't connect to the next stage at {at} port {after.port}: is it open?",
                next_lost=True,
            )
        )

    async def _fetch(self, decision: Fetch) -> None:
        generation, assign = decision.generation, decision.assign
        progress = self._progress[generation] = Progress()
        try:
            folder = await self._store.stage(
                assign.model, assign.root, assign.layers, Supply.of(assign), progress
            )
            start = await self._preparation.start(generation, assign, folder)
        except MolinkError as error:
            log.warning("stage %d of %s: %s", assign.stage, assign.model, error)
            failed = partial(
                self._keeper.failed,
                no_room=isinstance(error, NoRoomBesideError),
                no_files=isinstance(error, FilesMissing),
            )
            self._carry_out(failed(generation, str(error)))
        except Exception as error:
            log.exception("stage %d of %s", assign.stage, assign.model)
            self._carry_out(self._keeper.failed(generation, f"internal error: {error!r}"))
        else:
            self._carry_out(self._keeper.fetched(generation, start))
        finally:
            del self._fetches[generation], self._progress[generation]

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
        if isinstance(message, Loaded):
            self.recovery.loaded(message.weights_s, message.profile_s, self._now())
        self._carry_out(self._keeper.worker_said(generation, message))
        if isinstance(message, Formed) and self._wants_spare:
            self.supervisor.keep_spare(generation)

    def _worker_exited(self, generation: int, reason: str) -> None:
        self._carry_out(self._keeper.failed(generation, reason))
