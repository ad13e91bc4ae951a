"""A peer in its swarm: everything that follows from what the coordinator says."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from msgspec import structs

from molink.checkpoint.source import DEMO_MODEL, demo_model
from molink.errors import MolinkError
from molink.swarm.frontend.stream import StreamLimits
from molink.swarm.membership.versions import ours
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.instructions import (
    Assign,
    Form,
    Knocking,
    Member,
    MemberGone,
    Notice,
    Prefetch,
    Revoked,
    Route,
    RouteGone,
    StageAddress,
    StageProfile,
    Twin,
    Unassign,
)
from molink.wire.messages.leading import SendState, SharedState
from molink.wire.messages.reports import MAX_LATENCY, PeerReport, Reached, TransferState
from molink.wire.messages.requests import LeaveRequest, StatusRequest
from molink.wire.sockets.endpoints import endpoints
from molinkd.api.backend import Figures, ServedModel
from molinkd.peer.agent.assignments import Assignments
from molinkd.peer.agent.awake import Awake
from molinkd.peer.agent.device_probe import Measured
from molinkd.peer.agent.gpu_use import OwnUse
from molinkd.peer.agent.link_rates import LinkRates
from molinkd.peer.agent.pauser import Pauser
from molinkd.peer.agent.readiness import Readiness
from molinkd.peer.artifacts.hashing import Hasher
from molinkd.peer.artifacts.hub_source import hub_source
from molinkd.peer.artifacts.library import Library
from molinkd.peer.artifacts.shelf import Shelf
from molinkd.peer.artifacts.sources import Sources
from molinkd.peer.artifacts.store import Store
from molinkd.peer.artifacts.suppliers import Source
from molinkd.peer.copies import Copies
from molinkd.peer.election.leadership import Leadership
from molinkd.peer.frontend.heads import Heads
from molinkd.peer.frontend.served import ServedModels
from molinkd.peer.frontend.streams import Requests
from molinkd.peer.launch import KnocksNow, StageNow, Transferring, Trouble
from molinkd.peer.local_status import local_status
from molinkd.peer.membership.addresses import advertised
from molinkd.peer.membership.detours import Detours
from molinkd.peer.membership.known_members import KnownMembers
from molinkd.peer.membership.probe import can_connect
from molinkd.peer.membership.session import CoordinatorSession
from molinkd.peer.relaying import Relaying
from molinkd.peer.resources import Resources
from molinkd.peer.running_clock import RunningClock

log = logging.getLogger(__name__)


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
        """``endpoint()`` is the URL of this peer's endpoint.

        ``on_revoked()`` is called when the coordinator says that this peer is no member any more,
        ``on_twin()`` when another PC with the same key runs already.
        """
        self._on_twin = on_twin
        self._resources, self._leadership = resources, leadership
        self._endpoint, self._on_revoked = endpoint, on_revoked
        self._said = ""
        self._left = False
        self._awake = Awake()
        self._relaying = Relaying(resources, lambda told: self.session.tell(told), self._detour)
        detours = self._relaying.detours
        changed, went = self._members_changed, self._member_went
        self._members = KnownMembers(
            resources, leadership.replica, self._tried, changed, went, detours
        )
        self._store = _open_store(resources, self._members, detours)
        self.session = self._make_session(resources)
        self._data_codec = data_codec()
        self._assignments = self._make_assignments(resources)
        settings = resources.settings
        self._pauser = Pauser(settings, self._own_use, self._paused)
        self._assignments.pause(bool(self._pauser.reason))
        self._link_rates = LinkRates(self._assignments.link_rates, self._measured_rate)
        self._copies = Copies(
            self._store,
            resources.library,
            self._assignments.layers,
            self.session.report_now,
            self._assignments.holds,
            wanted=settings.copies and settings.stage != "none",
        )
        loop = asyncio.get_running_loop()
        self._clock = RunningClock(loop)
        self._shelf = Shelf(resources.home.models, resources.library, self.session.report_now)
        self._heads = Heads(
            resources.context, resources.keys, self._heads_changed, self._head_said, detours.address
        )
        limits = StreamLimits(hold_s=settings.hold)
        self.requests = Requests(
            self._heads, limits, self._metrics, self._clock, self.status, settings.router
        )
        self._served = ServedModels(self._store, self._models_changed, self._trouble)
        self._readiness = Readiness(
            resources.announce, self.session, self._assignments, self.requests
        )
        self._members.remember()
        self._watching = loop.create_task(self._store.transfers.watch(self._tell_transfers))

    def _make_session(self, resources: Resources) -> CoordinatorSession:
        leadership = self._leadership
        session = CoordinatorSession(
            resources.context,
            resources.keys,
            leadership.target,
            self._report,
            self._take,
            self._welcomed,
            self._trouble,
            leadership.noted,
            leadership.cut,
        )
        leadership.on_follow = session.follow
        return session

    def _make_assignments(self, resources: Resources) -> Assignments:
        return Assignments(
            resources.settings,
            resources.keys,
            self._store,
            self._members.book,
            resources.home,
            self.session.tell,
            self._stages_changed,
            resources.offenders.blocked,
            self._reaches,
        )

    def start(self, measured: Measured) -> None:
        """Begin to report to the coordinator and to do what it says."""
        self._measured = measured
        self._assignments.measured(measured)
        self.session.start()
        self._leadership.start()
        self._link_rates.start()
        self._shelf.start()
        self._pauser.start(measured.device)

    async def goodbye(self) -> None:
        """Have the others go on without this peer, before anything of it ends."""
        self._leadership.resign()
        # Our own coordinator ends with us, and another one looks who is still there.
        if not self._leadership.leads and not self._left:
            await self.session.goodbye()

    async def close(self) -> None:
        """End the session, all requests, transfers and workers."""
        await self._pauser.close()
        await self._link_rates.close()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._readiness.close()
        await self.session.close()
        await self._members.close()
        await self._relaying.close()
        self.requests.close()
        self._clock.close()
        await self._served.close()
        await self._copies.close()
        await self._shelf.close()
        await self._heads.close()
        await self._assignments.close()
        self._awake.close()

    # --- for the user of this PC -------------------------------------------------------------

    async def status(self, outlook: bool = False) -> bytes:
        """The coordinator's view of the swarm; this peer's if it can't be asked (JSON, UTF-8).

        Either way with the members that this PC has cut off.
        """
        try:
            asked = StatusRequest(ref=0, outlook=outlook)
            _, text = await self.session.request_payload(asked, timeout=3.0)
        except MolinkError as error:
            reason = self.session.failure or str(error)
            routes = self._heads.routes
            usable = {
                target.pipeline for route in routes for target in self._heads.targets(route.model)
            }
            text = local_status(
                self._leadership.target, self._resources.me, self._report(), routes, reason, usable
            )
        return self._resources.offenders.shown_in(text)

    async def relay(
        self, message: ControlMessage, payload: bytes | None = None
    ) -> tuple[ControlMessage, bytes]:
        """What the coordinator answers to a request of this PC's user, with the payload."""
        return await self.session.request_payload(message, payload=payload)

    async def leave(self) -> None:
        """Tell the coordinator that this peer is no member any more, if it can be told."""
        try:
            await self.session.request(LeaveRequest(ref=0), timeout=5.0)
            self._left = True
        except MolinkError as error:
            self._trouble(f"the coordinator was not told: {error}")

    @property
    def device(self) -> str:
        """This peer's device, as torch calls it."""
        return self._measured.name

    def drain(self, drain: bool) -> None:
        """Hold no layers for now, or do so again; the coordinator sees to it."""
        self._pauser.drain(drain)

    # --- the coordinator ---------------------------------------------------------------------

    def _report(self) -> PeerReport:
        settings, paused, speaks = self._resources.settings, self._pauser.reason, ours()
        return PeerReport(
            name=settings.name,
            version=speaks.version,
            protocol=speaks.protocol,
            addresses=advertised(settings.host, settings.advertise),
            control_port=self._resources.server.port,
            endpoint=self._endpoint(),
            daemon_pid=os.getpid(),
            stage="none" if paused else settings.stage,
            paused=paused,
            device=self._measured.device,
            models=self._resources.library.names,
            workers=self._assignments.states(),
            prefetched=self._assignments.prefetched,
            replica=self._leadership.replica.version,
            system=sys.platform,
            worker_ports=settings.worker_ports,
            copied=self._copies.percent,
            parts=self._shelf.parts([route.root for route in self._heads.routes]),
            transfers=self._transfers(),
            routes=self._heads.known,
            relays=settings.relay and not self._pauser.resting,
            load=self._assignments.supervisor.load(),
            pc=self._resources.pc,
        )

    def _welcomed(self) -> None:
        self._members.welcomed()
        self._link_rates.repeat()
        self._heads.welcomed()
        self._assignments.repeat()

    def _take(self, message: ControlMessage, payload: memoryview | None) -> None:
        match message:
            case SharedState() | SendState():
                self._share(payload)
            case Member() | MemberGone():
                self._members.take(message)
            case Revoked():
                self._left = True
                self._on_revoked()
            case Twin():
                self._left = True  # the other one stays
                self._on_twin()
            case Notice():
                if message.text:
                    self._trouble(message.text)
            case Knocking():
                self._resources.announce(KnocksNow(knocks=message.knocks))
            case Prefetch() | Assign() | StageProfile() | Form() | Unassign():
                self._assignments.handle(self._relaying.detours.order(message))
            case Route():
                self._forget_routes(self._heads.update(message))
                self._served.update(message)
                self._copies.serve(message)
                self._readiness.take(message)
            case RouteGone():
                self._heads.remove(message.pipeline)
                self._forget_routes([message.pipeline])
            case _ if not self._relaying.take(message):
                log.debug("unexpected %s of the coordinator", type(message).__name__)

    def _forget_routes(self, pipelines: Sequence[str]) -> None:
        self._readiness.forget(pipelines)
        for pipeline in pipelines:
            self._served.remove(pipeline)
            self._copies.gone(pipeline)

    def _share(self, payload: memoryview | None) -> None:
        """Take the coordinator's state, or send the copy of it that is here."""
        held = self._leadership.replica.held
        if payload is not None:
            self._leadership.shared(payload)
            self._members.remember()
        elif held is not None:
            data = held.encode()
            self.session.tell(SharedState(payload=Payload("u8", (len(data),))), data)

    def _members_changed(self) -> None:
        self._assignments.members_changed()

    def _member_went(self, peer: str) -> None:
        self._link_rates.forget(peer)
        self._store.forget(peer)

    def _tried(self, peer: str, reached: bool, away: float | None, relayed: bool) -> None:
        if away is not None:
            away = min(away, MAX_LATENCY)
        self.session.tell(Reached(peer=peer, ok=reached, latency=away, relayed=relayed))

    def _detour(self, peer: str) -> None:
        """One to a member has come, or is gone."""
        self._members.retry(peer)
        self._heads.moved(peer)

    def _measured_rate(self, peer: str, rate: float) -> None:
        self.session.tell(Reached(peer=peer, ok=True, rate=rate))

    async def _reaches(self, stage: StageAddress) -> bool:
        targets = endpoints(stage.addresses, stage.port)
        resources = self._resources
        return await can_connect(
            resources.context, resources.keys, self._data_codec, stage.public_key, targets
        )

    def _trouble(self, text: str) -> None:
        self._resources.announce(Trouble(text=text))

    # --- what changes here -------------------------------------------------------------------

    def _own_use(self) -> OwnUse:
        return self._assignments.supervisor.own_use

    def _paused(self) -> None:
        self._assignments.pause(bool(self._pauser.reason))
        self.session.report_now()

    def _stages_changed(self) -> None:
        self.session.report_now()
        if self._resources.settings.keep_awake:
            self._awake.keep(bool(self._assignments.states()))
        text = self._assignments.describe()
        if text != self._said:
            self._said = text
            self._resources.announce(StageNow(text=text))

    def _transfers(self) -> tuple[TransferState, ...]:
        """What comes to this PC, with the names of those who send it."""
        return tuple(
            structs.replace(one, source=self._members.book.name(one.source))
            for one in self._store.transfers.shown()
        )

    def _tell_transfers(self) -> None:
        self._resources.announce(Transferring(transfers=self._transfers()))

    def _models_changed(self, models: Sequence[ServedModel]) -> None:
        self.requests.serve(models)
        for model in models:
            self._readiness.model_changed(model.name)

    def _heads_changed(self, model: str) -> None:
        self.requests.heads_changed(model)
        self._readiness.model_changed(model)

    def _head_said(self, pipeline: str, message: DataMessage, payload: memoryview | None) -> None:
        self.requests.message(pipeline, message, payload)

    def _metrics(self) -> Figures:
        figures = self._assignments.supervisor.metrics()
        counters = figures.counters
        control = self._resources.server.counters
        counters |= self._assignments.recovery.counters
        figures.gauges.update(self._assignments.recovery.gauges)
        counters["daemon_bytes_fetched"] = float(self._store.received)
        counters["control_strangers_refused"] = float(control.strangers)
        counters["control_messages_malformed"] = float(control.malformed)
        counters["control_messages_forbidden"] = float(control.forbidden)
        counters["control_members_blocked"] = float(control.blocked)
        return figures


def _open_store(resources: Resources, members: KnownMembers, detours: Detours) -> Store:
    """The model files of this PC, and those that other members have."""
    sources = Sources(resources.context, resources.keys, members.book, detours.endpoint)

    def connect(peer: str) -> AbstractAsyncContextManager[Source]:
        return hub_source(peer) if "@" in peer else sources.connect(peer)

    return Store(
        resources.home.models,
        resources.me,
        resources.library,
        connect,
        _bundled(resources.home.hashes),
        partial(resources.offenders.blocked, "this PC, as a source of models"),
        resources.transfers,
        members.near,
        hub=resources.settings.hub_files,
    )


def _bundled(hashes: Path) -> Library:
    """The model that came with molink, so that nobody has to send it."""
    library = Library(Hasher(hashes))
    try:
        library.add(DEMO_MODEL, demo_model().path)
    except MolinkError as error:
        log.info("%s", error)
    return library
