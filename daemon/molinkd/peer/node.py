"""A peer in its swarm: carries out the coordinator's messages."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from molink.checkpoint.model_names import DEMO_MODEL_NAME, find_demo_folder
from molink.errors import MolinkError, StateError
from molink.swarm.frontend.stream import StreamLimits
from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.sanitize import sanitize_pairings
from molink.swarm.membership.versions import own_version
from molink.wire.messages.admin import LeaveRequest, RenameRequest, StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.election import StateReplica, StateRequest
from molink.wire.messages.instructions import (
    Assign,
    DuplicatePeer,
    FormPipeline,
    Notice,
    PeerInfo,
    PeerRemoved,
    PendingPairings,
    Prefetch,
    Revoked,
    Route,
    RouteRemoved,
    StageAddress,
    StageProfile,
    Unassign,
)
from molink.wire.messages.peer_reports import MAX_LATENCY, PeerReport, ReachReport, TransferState
from molink.wire.sockets.create_socket import endpoints
from molinkd.api.backend import MetricValues, ServedModel
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.agent.link_rates import LinkRateReporter
from molinkd.peer.agent.pause_controller import OwnGpuUsage, PauseController
from molinkd.peer.agent.readiness import ReadinessMonitor
from molinkd.peer.agent.sleep_inhibitor import SleepInhibitor
from molinkd.peer.agent.stage_manager import StageManager
from molinkd.peer.artifacts.hashing import Hasher
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.partial_models import PartialModels
from molinkd.peer.artifacts.replicator import Replicator
from molinkd.peer.artifacts.source_clients import PeerConnector, open_hub_source
from molinkd.peer.artifacts.sources import Source
from molinkd.peer.election.leadership import Leadership, ReplicaFile
from molinkd.peer.frontend.scheduler_connections import SchedulerConnections
from molinkd.peer.frontend.served_models import ServedModels
from molinkd.peer.frontend.swarm_backend import RunningClock, SwarmBackend
from molinkd.peer.launch import (
    PairingsChangedEvent,
    ProblemReportedEvent,
    StageStatusChangedEvent,
    TransfersChangedEvent,
)
from molinkd.peer.membership.peer_directory import PeerDirectory
from molinkd.peer.membership.peer_prober import ProbeResult, can_connect
from molinkd.peer.membership.relay_controller import RelayController
from molinkd.peer.membership.relayed_routes import RelayedRoutes
from molinkd.peer.membership.session import CoordinatorSession
from molinkd.peer.resources import Resources
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Routes and rings that wait for the membership log.
_MAX_UNPROVEN = 32


class Node:
    """One peer's part in a swarm, from its first report to its last."""

    def __init__(
        self,
        resources: Resources,
        leadership: Leadership,
        endpoint: Callable[[], str],
        on_revoked: Callable[[], None] = lambda: None,
        on_twin: Callable[[], None] = lambda: None,
    ) -> None:
        """``endpoint()`` returns the URL of this peer's API.

        ``on_revoked()`` is called when this peer was removed from the swarm, ``on_twin()`` when
        another peer with the same key is running.
        """
        self._on_duplicate = on_twin
        self._resources, self._leadership = resources, leadership
        self._api_url, self._on_banned = endpoint, on_revoked
        self._stage_text = ""
        #: Last routes and rings through peers that are no members by this PC's log.
        self._unproven: dict[tuple[type, str], FormPipeline | Route] = {}
        self._has_left = False
        self._sleep_inhibitor = SleepInhibitor()
        self._relay = RelayController(
            resources, lambda message: self.session.send_message(message), self._on_relayed_route
        )
        relayed_routes = self._relay.routes
        self._peers = self._make_directory(leadership.replica)
        self._store = _create_store(resources, self._peers, relayed_routes)
        self.session = self._make_session(resources)
        self._data_codec = data_codec()
        self._stages = self._make_assignments(resources)
        settings = resources.settings
        self._pause_controller = PauseController(
            settings, self._own_gpu_usage, self._on_pause_changed
        )
        self._stages.set_paused(bool(self._pause_controller.stage_pause_reason))
        self._link_rates = LinkRateReporter(self._stages.collect_link_rates, self._report_rate)
        self._replicator = Replicator(
            self._store,
            resources.repository,
            self._stages.held_layers,
            self.session.report_now,
            self._stages.has_pipeline,
            wanted=settings.replicate_models and settings.stage != "none",
        )
        loop = asyncio.get_running_loop()
        self._clock = RunningClock(loop)
        self._partial_models = PartialModels(
            resources.home.models, resources.repository, self.session.report_now
        )
        self._schedulers = SchedulerConnections(
            resources.context,
            resources.keys,
            self._on_targets_changed,
            self._on_scheduler_message,
            relayed_routes.localize_stage,
        )
        self.backend = self._make_backend(resources)
        self._served = ServedModels(self._store, self._on_models_changed, self._announce_problem)
        self._readiness = ReadinessMonitor(
            resources.announce, self.session, self._stages, self.backend
        )
        self._peers.load_replica()
        self._renaming: asyncio.Task[None] | None = None
        self._transfer_watcher = loop.create_task(
            self._store.transfers.watch_transfers(self._announce_transfers)
        )

    def _make_session(self, resources: Resources) -> CoordinatorSession:
        leadership = self._leadership
        session = CoordinatorSession(
            resources.context,
            resources.keys,
            leadership.target,
            self._build_report,
            self._on_message,
            self._on_welcome,
            self._announce_problem,
            leadership.on_heartbeat,
            leadership.on_connection_lost,
            resources.rendezvous,
        )
        leadership.on_follow = session.follow_coordinator
        session.find_log = lambda: leadership.replica.log
        return session

    def _make_assignments(self, resources: Resources) -> StageManager:
        return StageManager(
            resources.settings,
            resources.keys,
            self._store,
            self._peers.book,
            resources.home,
            self.session.send_message,
            self._on_stages_changed,
            resources.banned_peers.record_ban,
            self._can_reach,
        )

    def _make_directory(self, replica: ReplicaFile) -> PeerDirectory:
        return PeerDirectory(
            self._resources,
            replica,
            self._report_reach,
            self._on_peers_changed,
            self._on_peer_removed,
            self._report_loss,
            self._relay.routes,
        )

    def _make_backend(self, resources: Resources) -> SwarmBackend:
        settings = resources.settings
        return SwarmBackend(
            self._schedulers,
            StreamLimits(pipeline_wait_timeout=settings.pipeline_wait_timeout),
            self._collect_metrics,
            self._clock,
            self.query_status,
            settings.router,
        )

    def start(self, measured: MeasuredDevice) -> None:
        """Start reporting to the coordinator and carrying out its orders."""
        self._stages.set_device(measured)
        self.session.start()
        self._leadership.start()
        self._link_rates.start()
        self._partial_models.start()
        self._pause_controller.start(measured.device)

    async def send_goodbye(self) -> None:
        """Announce this peer's stop before anything is closed."""
        self._leadership.resign()
        # Our own coordinator stops with us; the next one detects the missing peers.
        if not self._leadership.is_leader and not self._has_left:
            await self.session.send_goodbye()

    async def close(self) -> None:
        """Close the session, requests, transfers and workers."""
        await self._pause_controller.close()
        await self._link_rates.close()
        await cancel_tasks(self._transfer_watcher, self._renaming)
        await self._readiness.close()
        await self.session.close()
        await self._peers.close()
        await self._relay.close()
        self.backend.close()
        self._clock.close()
        await self._served.close()
        await self._replicator.close()
        await self._partial_models.close()
        await self._schedulers.close()
        await self._stages.close()
        self._sleep_inhibitor.close()

    # --- requests of this PC's user ---

    async def query_status(self, scale_out: bool = False) -> bytes:
        """The swarm's status as JSON (UTF-8), from this peer if the coordinator is unreachable.

        Includes the peers that this PC has banned.
        """
        try:
            asked = StatusRequest(ref=0, scale_out=scale_out)
            _, text = await self.session.request_payload(asked, timeout=3.0)
        except MolinkError as error:
            from molinkd.peer.local_status import local_status

            reason = self.session.failure_reason or str(error)
            routes = self._schedulers.routes
            usable = {
                target.pipeline
                for route in routes
                for target in self._schedulers.ready_targets(route.model)
            }
            text = local_status(
                self._leadership.target,
                self._resources.me,
                self._build_report(),
                routes,
                reason,
                usable,
            )
        return self._add_router(self._resources.banned_peers.add_to_status(text))

    def _add_router(self, status: bytes) -> bytes:
        """``molink status --json`` with what this PC knows of its own router."""
        mapper, kind = self._resources.port_mapper, self._relay.routes.router.kind
        known = {
            "kind": kind,
            "forwards": "" if mapper is None else mapper.address,
            "protocol": "" if mapper is None else mapper.mapped_by,
            "refuses": "" if mapper is None else mapper.failure,
        }
        if not any(known.values()):
            return status
        return msgspec.json.encode({**msgspec.json.decode(status), "router": known})

    async def forward_request(
        self, message: ControlMessage, payload: bytes | None = None
    ) -> tuple[ControlMessage, bytes]:
        """Forward a user's request to the coordinator; returns its reply with the payload."""
        return await self.session.request_payload(message, payload=payload)

    async def leave_swarm(self) -> None:
        """Tell the coordinator that this peer leaves, if it is reachable."""
        try:
            devices = self._peers.list_devices()
            await self.session.request(LeaveRequest(ref=0, devices=devices), timeout=5.0)
            self._has_left = True
        except MolinkError as error:
            self._announce_problem(f"can't notify the coordinator: {error}")

    @property
    def device(self) -> str:
        """The torch name of this peer's device."""
        return self._stages.device.name

    def set_drained(self, drain: bool) -> None:
        """Drain or resume this peer."""
        self._pause_controller.set_drained(drain)

    # --- coordinator ---

    def _build_report(self) -> PeerReport:
        settings, paused, speaks = (
            self._resources.settings,
            self._pause_controller.stage_pause_reason,
            own_version(),
        )
        return PeerReport(
            name=settings.name,
            version=speaks.version,
            protocol=speaks.protocol,
            addresses=self._resources.addresses,
            control_port=self._resources.server.port,
            api_address=self._api_url(),
            daemon_pid=os.getpid(),
            requests=self.backend.num_started,
            stage="none" if paused else settings.stage,
            pause_reason=paused,
            device=self._stages.device.device,
            models=self._resources.repository.model_names,
            workers=self._stages.stage_states(),
            prefetch=self._stages.prefetch_state,
            replica=self._leadership.replica.version,
            log_digest=self._leadership.replica.log_digest,
            platform=sys.platform,
            worker_ports=settings.worker_ports,
            replicated_percent=self._replicator.percent,
            partial_models=self._partial_models.list_models(
                [route.root for route in self._schedulers.routes]
            ),
            transfers=self._transfer_states(),
            routes=self._schedulers.route_summaries,
            can_relay=settings.relay and not self._pause_controller.pause_reason,
            rendezvous=self._relay.rendezvous_place,
            load=self._stages.supervisor.measure_load(),
            primary_peer=self._resources.pc,
        )

    def _on_welcome(self) -> None:
        self._peers.on_welcome()
        self._link_rates.report_all()
        self._schedulers.on_welcome()
        self._stages.resend_reports()
        log, name = self._leadership.replica.log, self._resources.settings.name
        member = None if log is None else log.members.get(self._resources.me)
        if member is not None and member.own_name != name and self._renaming is None:
            self._renaming = asyncio.get_running_loop().create_task(self._rename_peer(name))

    async def _rename_peer(self, name: str) -> None:
        try:
            await self.session.request(RenameRequest(ref=0, name=name))
        except MolinkError as error:
            self._announce_problem(f"this PC keeps its former name: {error}")

    def _on_message(self, message: ControlMessage, payload: memoryview | None) -> None:
        match message:
            case StateReplica() | StateRequest() | Revoked() | DuplicatePeer():
                self._on_membership_message(message, payload)
            case PeerInfo() | PeerRemoved():
                self._peers.on_message(message)
            case Notice():
                if message.text:
                    self._announce_problem(message.text)
            case PendingPairings():
                self._resources.announce(
                    PairingsChangedEvent(pairings=sanitize_pairings(message.pairings))
                )
            case FormPipeline() | Route() if not self._is_of_members(message):
                # The log that proves them may be on its way.
                self._unproven[type(message), message.pipeline] = message
                if len(self._unproven) > _MAX_UNPROVEN:
                    del self._unproven[next(iter(self._unproven))]
            case Prefetch() | Assign() | StageProfile() | FormPipeline() | Unassign():
                self._stages.handle_order(self._relay.routes.localize_order(message))
            case Route():
                self._drop_pipelines(self._schedulers.update_route(message))
                self._served.update_route(message)
                self._replicator.update_route(message)
                self._readiness.on_route(message)
            case RouteRemoved():
                self._unproven.pop((Route, message.pipeline), None)
                self._schedulers.remove_pipeline(message.pipeline)
                self._drop_pipelines([message.pipeline])
            case _ if not self._relay.on_message(message):
                log.debug("unexpected %s of the coordinator", type(message).__name__)

    def _on_membership_message(
        self,
        message: StateReplica | StateRequest | Revoked | DuplicatePeer,
        payload: memoryview | None,
    ) -> None:
        match message:
            case Revoked():
                self._on_revoked(payload)
            case DuplicatePeer():
                self._has_left = True  # the other peer stays
                self._on_duplicate()
            case _:
                self._exchange_state(payload)

    def _is_of_members(self, message: FormPipeline | Route) -> bool:
        """Whether requests and rows go to members only, even under a hostile leader."""
        ring = (message.scheduler,) if isinstance(message, Route) else message.ring
        return all(self._peers.is_member_stage(one) for one in ring if one is not None)

    def _drop_pipelines(self, pipelines: Sequence[str]) -> None:
        self._readiness.drop_pipelines(pipelines)
        for pipeline in pipelines:
            self._served.remove_pipeline(pipeline)
            self._replicator.remove_pipeline(pipeline)

    def _exchange_state(self, payload: memoryview | None) -> None:
        """Store the coordinator's state, or send our replica of it."""
        held = self._leadership.replica.replica
        if payload is not None:
            self._leadership.on_shared_state(payload)
            self._peers.load_replica()
            waiting, self._unproven = self._unproven, {}
            for message in waiting.values():
                self._on_message(message, None)
        elif held is not None:
            data = held.encode()
            self.session.send_message(StateReplica(payload=Payload("u8", (len(data),))), data)

    def _on_revoked(self, proof: memoryview | None) -> None:
        """Stop if an owner has shut this PC out; a coordinator can't."""
        try:
            claimed = MembershipLog.decode(self._leadership.target.swarm, proof or b"")
        except StateError as error:
            log.warning("the coordinator claims that this PC was shut out: %s", error)
            return
        known = self._leadership.replica.log
        if known is not None:  # it may know of a readmission
            claimed = known.merge_log(claimed)
        member = claimed.members.get(self._resources.me)
        if member is None or member.standing != "revoked":
            log.warning("the coordinator claims that this PC was shut out, which no owner signed")
            return
        self._has_left = True
        self._on_banned()

    def _on_peers_changed(self) -> None:
        self._stages.update_peer_keys()

    def _on_peer_removed(self, peer: str) -> None:
        self._link_rates.drop_peer(peer)
        self._store.drop_peer(peer)

    def _report_reach(self, peer: str, result: ProbeResult) -> None:
        latency = None if result.latency is None else min(result.latency, MAX_LATENCY)
        self.session.send_message(
            ReachReport(peer=peer, **(result._asdict() | {"latency": latency}))
        )

    def _on_relayed_route(self, peer: str) -> None:
        """Reconnect to a peer whose relayed route was added or removed."""
        self._peers.retry_peer(peer)
        self._schedulers.reconnect_peer(peer)

    def _report_rate(self, peer: str, rate: float) -> None:
        self.session.send_message(ReachReport(peer=peer, is_reachable=True, rate=rate))

    def _report_loss(self, peer: str, loss: float) -> None:
        self.session.send_message(ReachReport(peer=peer, is_reachable=True, loss=loss))

    async def _can_reach(self, stage: StageAddress) -> bool:
        targets = endpoints(stage.addresses, stage.port)
        resources = self._resources
        return await can_connect(
            resources.context, resources.keys, self._data_codec, stage.public_key, targets
        )

    def _announce_problem(self, text: str) -> None:
        self._resources.announce(ProblemReportedEvent(text=text))

    # --- local changes ---

    def _own_gpu_usage(self) -> OwnGpuUsage:
        return self._stages.supervisor.own_gpu_usage

    def _on_pause_changed(self) -> None:
        self._stages.set_paused(bool(self._pause_controller.stage_pause_reason))
        self.session.report_now()

    def _on_stages_changed(self) -> None:
        self.session.report_now()
        if self._resources.settings.keep_awake:
            self._sleep_inhibitor.inhibit_sleep(bool(self._stages.stage_states()))
        text = self._stages.describe_stages()
        if text != self._stage_text:
            self._stage_text = text
            self._resources.announce(StageStatusChangedEvent(text=text))

    def _transfer_states(self) -> tuple[TransferState, ...]:
        """Transfers to this PC, with the names of the sources."""
        return tuple(
            structs.replace(one, source=self._peers.book.name_of(one.source))
            for one in self._store.transfers.transfer_states()
        )

    def _announce_transfers(self) -> None:
        self._resources.announce(TransfersChangedEvent(transfers=self._transfer_states()))

    def _on_models_changed(self, models: Sequence[ServedModel]) -> None:
        self.backend.set_models(models)
        for model in models:
            self._readiness.update_model(model.name)

    def _on_targets_changed(self, model: str) -> None:
        self.backend.on_targets_changed(model)
        self._readiness.update_model(model)

    def _on_scheduler_message(
        self, pipeline: str, message: DataMessage, payload: memoryview | None
    ) -> None:
        self.backend.on_message(pipeline, message, payload)

    def _collect_metrics(self) -> MetricValues:
        figures = self._stages.supervisor.collect_metrics()
        counters = figures.counters
        control = self._resources.server.counters
        counters |= self._stages.recovery.counters
        figures.gauges.update(self._stages.recovery.gauges)
        counters["daemon_bytes_fetched"] = float(self._store.bytes_received)
        counters["control_strangers_refused"] = float(control.unauthenticated)
        counters["control_messages_malformed"] = float(control.malformed)
        counters["control_messages_forbidden"] = float(control.forbidden)
        counters["control_members_blocked"] = float(control.blocked)
        return figures


def _create_store(
    resources: Resources, members: PeerDirectory, relayed_routes: RelayedRoutes
) -> ModelStore:
    """This PC's model store, with peers and the hub as sources."""
    sources = PeerConnector(
        resources.context, resources.keys, members.book, relayed_routes.local_endpoint
    )

    def connect(peer: str) -> AbstractAsyncContextManager[Source]:
        return open_hub_source(peer) if "@" in peer else sources.connect_peer(peer)

    return ModelStore(
        resources.home.models,
        resources.me,
        resources.repository,
        connect,
        _bundled_models(resources.home.hashes),
        partial(resources.banned_peers.record_ban, "this PC, as a source of models"),
        resources.transfers,
        members.is_nearby,
        hub=resources.settings.hub_files,
    )


def _bundled_models(hashes: Path) -> ModelRepository:
    """The bundled model, which need not be fetched."""
    repository = ModelRepository(Hasher(hashes))
    try:
        repository.add_model(DEMO_MODEL_NAME, find_demo_folder())
    except MolinkError as error:
        log.info("%s", error)
    return repository
