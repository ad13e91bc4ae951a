"""Shell of :mod:`molink.swarm.agent.stage_agent`: runs its fetches, workers and reports."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from molink.errors import FilesMissing, MolinkError
from molink.facts.identity import derive_peer_id
from molink.facts.layer_range import stage_number
from molink.facts.model import LayerRange
from molink.swarm.agent.recovery import RecoveryTimer
from molink.swarm.agent.stage_agent import (
    AgentAction,
    FetchFilesAction,
    SendToCoordinatorAction,
    SendToWorkerAction,
    StageAgent,
    StartWorkerAction,
    StopWorkerAction,
    WorkerMessage,
    is_reportable,
)
from molink.swarm.artifacts.sources import ModelSources
from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    Prefetch,
    StageAddress,
    StageProfile,
    Unassign,
)
from molink.wire.messages.peer_reports import PrefetchState, StageFailed, WorkerState
from molink.wire.messages.worker_pipe import (
    LoadStage,
    PeerBlocked,
    RingFormed,
    WorkerFailed,
    WorkerLoaded,
)
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.agent.stage_preparation import NoRoomBesideError, StagePreparation
from molinkd.peer.agent.worker_supervisor import WorkerSupervisor
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.prefetcher import Prefetcher
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Interval of the workers' liveness check, in seconds.
WORKER_CHECK_INTERVAL_S = 0.5


class StageManager:
    """The stages of this peer."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyPair,
        store: ModelStore,
        book: AddressBook,
        home: Home,
        send: Callable[[ControlMessage], None],
        on_change: Callable[[], None],
        on_blocked: Callable[[str, str, str], None],
        reaches: Callable[[StageAddress], Awaitable[bool]],
    ) -> None:
        """``on_change`` is called whenever :meth:`stage_states` may have changed.

        ``on_blocked`` gets the component, the peer that a worker blocked, and the reason.
        ``is_reachable`` probes a stage's port from this PC.
        """
        self._settings = settings
        self._store = store
        self._book = book
        self._send = send
        self._on_change = on_change
        self._on_blocked = on_blocked
        self._is_reachable = reaches
        self._me = derive_peer_id(keys.public)
        #: Pending ``FormPipeline`` orders, by pipeline: each waits until the next stage is
        #: reachable.
        self._forming: dict[str, tuple[FormPipeline, asyncio.Task[None]]] = {}
        self._form_tasks: set[asyncio.Task[None]] = set()
        #: Peer of the next stage, by pipeline; ended pipelines are removed lazily.
        self._next_peers: dict[str, str] = {}
        self._paused = False
        self._agent = StageAgent()
        self.recovery = RecoveryTimer()
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._progress: dict[int, Progress] = {}
        self._preparation = StagePreparation(settings, keys, home, self.recovery)
        self.supervisor = WorkerSupervisor(home.logs, self._on_worker_message, self._on_worker_exit)
        self._prefetcher = Prefetcher(store, on_change, self.supervisor.wait_until_ready)
        self._checker = asyncio.get_running_loop().create_task(self._check_workers())

    def collect_link_rates(self) -> dict[str, float]:
        """Bytes/s from this PC's stages to the next ones, by peer; 0 if unknown."""
        rates = {
            pipeline: self.supervisor.read_gauge(pipeline, "link_rate_bytes_per_second")
            for pipeline in self._next_peers
        }
        self._next_peers = {
            one: self._next_peers[one] for one, rate in rates.items() if rate is not None
        }
        return {peer: rates[one] or 0.0 for one, peer in self._next_peers.items()}

    def set_device(self, device: MeasuredDevice) -> None:
        """Set the measured device, which starts waiting for it need."""
        self._preparation.set_device(device)
        if self._wants_standby:
            self.supervisor.start_standby()

    @property
    def device(self) -> MeasuredDevice:
        """The device, with the kernels that work with the models tried so far."""
        return self._preparation.device

    def set_paused(self, paused: bool) -> None:
        """Stop or resume keeping standby workers."""
        self._paused = paused
        if paused:
            self.supervisor.drop_standbys()
        elif self._wants_standby and self._preparation.is_measured:
            self.supervisor.start_standby()

    @property
    def _wants_standby(self) -> bool:
        return self._settings.standby_worker and not self._paused

    def handle_order(
        self, message: Prefetch | Assign | StageProfile | FormPipeline | Unassign
    ) -> None:
        """Carry out an order of the coordinator."""
        match message:
            case Prefetch():
                self._prefetcher.start_prefetch(message)
            case Assign():
                self.recovery.end_phase("decided", self._now())
                # one transfer of a model at a time
                self._prefetcher.cancel_prefetch()
                self._carry_out(self._agent.assign_stage(message))
                # A worker that has been silent is replaced at once.
                self._carry_out(self._agent.check_liveness(self._now()))
            case StageProfile():
                self._agent.record_profile(message)
            case FormPipeline():
                self.recovery.end_phase("others", self._now())
                self._schedule_form(message)
            case Unassign():
                self._cancel_form(message.pipeline)
                self._carry_out(self._agent.unassign_pipeline(message.pipeline))

    def resend_reports(self) -> None:
        """Resend reports that the coordinator may have missed."""
        self._carry_out([*self._agent.resend_reports()])

    def update_peer_keys(self) -> None:
        """Send the workers the public keys of all peers."""
        self.supervisor.broadcast_message(self._book.peer_keys())

    def stage_states(self) -> tuple[WorkerState, ...]:
        """State of each stage of this peer."""
        fetched = {number: (*p.totals, 0) for number, p in self._progress.items()}
        transfers = self.supervisor.loading_progress() | fetched
        return self._agent.worker_states(
            transfers, self.supervisor.read_gauges("stage_decode_slowdown")
        )

    def held_layers(self) -> LayerRange:
        """Layers of this peer's first stage; ``(0, 0)`` if it has none."""
        return next((state.layers for state in self.stage_states()), (0, 0))

    def has_pipeline(self, pipeline: str) -> bool:
        """Whether this peer has a stage of ``pipeline``."""
        return any(state.pipeline == pipeline for state in self.stage_states())

    @property
    def prefetch_state(self) -> PrefetchState | None:
        """Progress of the current prefetch, if there is one."""
        return self._prefetcher.state

    def describe_stages(self) -> str:
        """All stages and the prefetch, as one line of text."""
        return ", ".join(filter(None, (self._agent.describe(), self._prefetcher.transfer_text)))

    async def close(self) -> None:
        """Cancel transfers and stop the workers."""
        await self._prefetcher.close()
        tasks = [self._checker, *self._fetches.values(), *self._form_tasks]
        await cancel_tasks(*tasks)
        await self.supervisor.close()
        self._preparation.close()

    # --- actions ---

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _carry_out(self, decisions: list[AgentAction]) -> None:
        for decision in decisions:
            match decision:
                case FetchFilesAction():
                    task = asyncio.get_running_loop().create_task(self._fetch_stage(decision))
                    self._fetches[decision.generation] = task
                case StartWorkerAction():
                    self.recovery.end_phase("files", self._now())
                    self._start_worker(decision)
                case SendToWorkerAction(generation, message):
                    if isinstance(message, LoadStage):
                        self.recovery.end_phase("files", self._now())
                    self.supervisor.send_to_worker(generation, message)
                case StopWorkerAction(generation, kill):
                    self._preparation.release_memory(generation)
                    fetch = self._fetches.get(generation)
                    if fetch is not None:
                        fetch.cancel()
                    self.supervisor.stop_worker(generation, kill=kill)
                case SendToCoordinatorAction(message):
                    if isinstance(message, StageFailed):
                        self.recovery.start_outage(self._now(), time.time())
                    self._send(message)
        if any(is_reportable(decision) for decision in decisions):
            self._on_change()

    async def _check_workers(self) -> None:
        while True:
            self._carry_out(self._agent.check_liveness(self._now()))
            await asyncio.sleep(WORKER_CHECK_INTERVAL_S)

    def _schedule_form(self, order: FormPipeline) -> None:
        """Form the ring once the next stage is reachable."""
        under_way = self._forming.get(order.pipeline)
        if under_way is None or under_way[0] != order:
            self._cancel_form(order.pipeline)
            task = asyncio.get_running_loop().create_task(self._form_pipeline(order))
            self._forming[order.pipeline] = order, task
            self._form_tasks.add(task)
            task.add_done_callback(self._form_tasks.discard)

    def _cancel_form(self, pipeline: str) -> None:
        under_way = self._forming.pop(pipeline, None)
        if under_way is not None:
            under_way[1].cancel()

    async def _form_pipeline(self, order: FormPipeline) -> None:
        places = [stage for stage, one in enumerate(order.ring) if one.peer == self._me]
        after = order.ring[(places[0] + 1) % len(order.ring)] if places else None
        if after is None or len(order.ring) == 1 or await self._is_reachable(after):
            del self._forming[order.pipeline]
            if after is not None:
                self._next_peers[order.pipeline] = after.peer
            self._carry_out(self._agent.form_ring(order))
            return
        del self._forming[order.pipeline]
        at = ", ".join(after.addresses)
        self._send(
            StageFailed(
                pipeline=order.pipeline,
                epoch=order.epoch,
                stage=places[0],
                reason=f"can't reach the next stage at {at} port {after.port}; check its firewall",
                next_lost=True,
            )
        )

    async def _fetch_stage(self, decision: FetchFilesAction) -> None:
        generation, assign = decision.generation, decision.assign
        progress = self._progress[generation] = Progress()
        try:
            folder = await self._store.fetch_stage(
                assign.model,
                assign.root,
                assign.layers,
                ModelSources.from_message(assign),
                progress,
            )
            start = await self._preparation.prepare_stage(generation, assign, folder)
        except MolinkError as error:
            log.warning("stage %d of %s: %s", stage_number(assign.stage), assign.model, error)
            failed = partial(
                self._agent.on_failure,
                out_of_memory=isinstance(error, NoRoomBesideError),
                files_missing=isinstance(error, FilesMissing),
            )
            self._carry_out(failed(generation, str(error)))
        except Exception as error:
            log.exception("stage %d of %s", stage_number(assign.stage), assign.model)
            self._carry_out(self._agent.on_failure(generation, f"internal error: {error!r}"))
        else:
            self._carry_out(self._agent.on_files_fetched(generation, start))
        finally:
            del self._fetches[generation], self._progress[generation]

    def _start_worker(self, decision: StartWorkerAction) -> None:
        generation = decision.generation
        try:
            pid = self.supervisor.start_worker(generation, decision.start, self._book.peer_keys())
        except OSError as error:
            reason = f"can't start a worker: {error}"
            self._carry_out(self._agent.on_failure(generation, reason))
        else:
            self._agent.on_worker_started(generation, pid)

    def _on_worker_message(self, generation: int, message: WorkerMessage) -> None:
        if isinstance(message, PeerBlocked):
            log.warning("a stage of this PC has blocked %s: %s", message.peer, message.reason)
            self._on_blocked("a stage of this PC", message.peer, message.reason)
        if isinstance(message, WorkerLoaded):
            self.recovery.record_load(message.weights_s, message.profile_s, self._now())
        if isinstance(message, WorkerFailed) and message.failed_kernels:
            # Reported before the failure, so that layers are placed again by the new facts.
            self._preparation.set_device(self.device.without_kernels(message.failed_kernels))
            self._on_change()
        self._carry_out(self._agent.on_worker_message(generation, message))
        if isinstance(message, RingFormed) and self._wants_standby:
            self.supervisor.schedule_standby(generation)

    def _on_worker_exit(self, generation: int, reason: str) -> None:
        self._carry_out(self._agent.on_failure(generation, reason))
