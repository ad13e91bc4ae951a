"""A peer in its swarm: everything that follows from what the coordinator says."""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import zmq.asyncio

import molink
from molink.checkpoint.source import DEMO_MODEL, demo_model
from molink.errors import MolinkError
from molink.facts.identity import peer_id
from molink.swarm.address_book import AddressBook
from molink.swarm.offenders import Offenders
from molink.swarm.stream import StreamLimits
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.control import (
    Assign,
    ControlMessage,
    Form,
    LeaveRequest,
    Member,
    MemberGone,
    Notice,
    PeerReport,
    Prefetch,
    Reached,
    Revoked,
    Route,
    RouteGone,
    StageAddress,
    StageProfile,
    StatusRequest,
    Unassign,
)
from molink.wire.messages.data import DataMessage
from molink.wire.messages.leading import SendState, SharedState
from molink.wire.messages.pipe import MemberKey
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.endpoints import endpoints
from molink.wire.sockets.server import Server
from molink.wire.sockets.zap import Gatekeeper
from molinkd.api.backend import Figures, ServedModel
from molinkd.peer.addresses import advertised
from molinkd.peer.assignments import Assignments
from molinkd.peer.copier import Copier
from molinkd.peer.device_probe import Measured
from molinkd.peer.heads import Heads
from molinkd.peer.home import Home
from molinkd.peer.launch import Announce, ModelReady, NotServed, StageNow, Trouble
from molinkd.peer.leadership import Leadership
from molinkd.peer.library import Library
from molinkd.peer.local_status import local_status
from molinkd.peer.probe import Prober, can_connect
from molinkd.peer.running_clock import RunningClock
from molinkd.peer.served import ServedModels
from molinkd.peer.session import CoordinatorSession
from molinkd.peer.settings import Settings
from molinkd.peer.sources import Sources
from molinkd.peer.store import Store
from molinkd.peer.streams import Requests

log = logging.getLogger(__name__)

#: Until a new session has named all members, in seconds.
SWEEP_S = 5.0
#: From a pipeline that isn't ready to asking why, in seconds.
WHY_S = 2.0
#: Until an answer is out, before connections are cut, in seconds.
_CUT_DELAY_S = 0.2


@dataclass(frozen=True, slots=True)
class Resources:
    """What a node uses of its daemon, which had it before the node."""

    settings: Settings
    home: Home
    keys: KeyPair
    context: zmq.asyncio.Context
    gatekeeper: Gatekeeper
    server: Server[ControlMessage]
    library: Library
    offenders: Offenders
    announce: Announce

    @property
    def me(self) -> str:
        """This peer's id."""
        return peer_id(self.keys.public)


class Node:
    """One peer's part in a swarm, from its first report to its last."""

    def __init__(
        self,
        resources: Resources,
        leadership: Leadership,
        endpoint: Callable[[], str],
        on_revoked: Callable[[], None] = lambda: None,
    ) -> None:
        """``endpoint()`` is the URL of this peer's endpoint.

        ``on_revoked()`` is called when the coordinator says that this peer is no member any more.
        """
        self._resources = resources
        self._leadership = leadership
        self._endpoint = endpoint
        self._on_revoked = on_revoked
        self._ready: dict[str, bool] = {}
        self._said = ""
        self._left = False
        #: Per pipeline, why it isn't ready, as announced last.
        self._reasons: dict[str, str] = {}
        #: Pipelines that were ready when the coordinator last spoke of them.
        self._were_ready: set[str] = set()
        self._asking: asyncio.Task[None] | None = None
        self._sweep: asyncio.TimerHandle | None = None
        settings, context, keys = resources.settings, resources.context, resources.keys
        self._book = AddressBook(MemberKey(peer=resources.me, public_key=keys.public))
        self._book.on_member = self._member_came
        self._book.on_gone = self._member_went
        connect = Sources(context, keys, self._book).connect
        self._store = Store(
            resources.home.models,
            resources.me,
            resources.library,
            connect,
            _bundled(),
            partial(resources.offenders.blocked, "this PC, as a source of models"),
        )
        self.session = CoordinatorSession(
            context,
            keys,
            leadership.target,
            self._report,
            self._take,
            self._welcomed,
            self._trouble,
            leadership.noted,
            leadership.cut,
        )
        leadership.on_follow = self.session.follow
        self._data_codec = data_codec()
        self._assignments = Assignments(
            settings,
            keys,
            self._store,
            self._book,
            resources.home,
            self.session.tell,
            self._stages_changed,
            resources.offenders.blocked,
            self._reaches,
        )
        self._copier = Copier(
            self._store,
            resources.library,
            self._assignments.layers,
            self.session.report_now,
            wanted=settings.copies and settings.stage != "none",
        )
        self._prober = Prober(context, keys, self._tried)
        self._heads = Heads(context, keys, self._heads_changed, self._head_said)
        limits = StreamLimits(hold_s=settings.hold)
        self._clock = RunningClock(asyncio.get_running_loop())
        self.requests = Requests(self._heads, limits, self._metrics, self._clock)
        self._served = ServedModels(self._store, self._models_changed, self._trouble)
        #: Invitations whose holders this peer sends on to the coordinator.
        self._invitations: frozenset[str] = frozenset()
        self._remember_members()

    def start(self, measured: Measured) -> None:
        """Begin to report to the coordinator and to do what it says."""
        self._measured = measured
        self._assignments.measured(measured)
        self.session.start()
        self._leadership.start()

    async def goodbye(self) -> None:
        """Have the others go on without this peer, before anything of it ends."""
        self._leadership.resign()
        # Our own coordinator ends with us, and another one looks who is still there.
        if not self._leadership.leads and not self._left:
            await self.session.goodbye()

    async def close(self) -> None:
        """End the session, all requests, transfers and workers."""
        if self._sweep is not None:
            self._sweep.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self.session.close()
        self.requests.close()
        self._clock.close()
        await self._prober.close()
        await self._served.close()
        await self._copier.close()
        await self._heads.close()
        await self._assignments.close()

    # --- for the user of this PC -------------------------------------------------------------

    async def status(self) -> bytes:
        """The coordinator's view of the swarm; this peer's if it can't be asked (JSON, UTF-8).

        Either way with the members that this PC has cut off.
        """
        try:
            _, text = await self.session.request_payload(StatusRequest(ref=0), timeout=3.0)
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

    async def relay(self, message: ControlMessage) -> tuple[ControlMessage, bytes]:
        """What the coordinator answers to a request of this PC's user, with the payload."""
        return await self.session.request_payload(message)

    async def leave(self) -> None:
        """Tell the coordinator that this peer is no member any more, if it can be told."""
        try:
            await self.session.request(LeaveRequest(ref=0), timeout=5.0)
            self._left = True
        except MolinkError as error:
            self._trouble(f"the coordinator was not told: {error}")

    # --- the coordinator ---------------------------------------------------------------------

    def _report(self) -> PeerReport:
        settings = self._resources.settings
        return PeerReport(
            name=settings.name,
            version=molink.__version__,
            addresses=advertised(settings.host, settings.advertise),
            control_port=self._resources.server.port,
            endpoint=self._endpoint(),
            daemon_pid=os.getpid(),
            stage=settings.stage,
            device=self._measured.device,
            models=self._resources.library.names,
            workers=self._assignments.states(),
            prefetched=self._assignments.prefetched,
            replica=self._leadership.replica.version,
            system=sys.platform,
            worker_ports=settings.worker_ports,
            copied=self._copier.percent,
        )

    def _welcomed(self) -> None:
        self._book.welcomed()
        self._heads.welcomed()
        self._prober.repeat()
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._book.sweep)
        self._assignments.repeat()

    def _take(self, message: ControlMessage, payload: memoryview | None) -> None:
        match message:
            case SharedState() | SendState():
                self._share(payload)
            case Member():
                if not self._book.add(message):
                    log.warning("the coordinator announces a member by another's id")
            case MemberGone():
                self._book.remove(message.peer)
            case Revoked():
                self._left = True
                self._on_revoked()
            case Notice():
                if message.text:
                    self._trouble(message.text)
            case Prefetch() | Assign() | StageProfile() | Form() | Unassign():
                self._assignments.handle(message)
            case Route():
                self._forget_routes(self._heads.update(message))
                self._served.update(message)
                self._copier.serve(message)
                self._announce_reason(message)
                self._time_recovery(message)
                if not (message.ready or message.forming) and self._asking is None:
                    loop = asyncio.get_running_loop()
                    self._asking = loop.create_task(self._log_why(message.model))
            case RouteGone():
                self._heads.remove(message.pipeline)
                self._forget_routes([message.pipeline])
            case _:
                log.debug("unexpected %s of the coordinator", type(message).__name__)

    def _forget_routes(self, pipelines: Sequence[str]) -> None:
        for pipeline in pipelines:
            self._reasons.pop(pipeline, None)
            self._were_ready.discard(pipeline)
            self._served.remove(pipeline)
            self._copier.gone(pipeline)

    def _share(self, payload: memoryview | None) -> None:
        """Take the coordinator's state, or send the copy of it that is here."""
        held = self._leadership.replica.held
        if payload is not None:
            self._leadership.shared(payload)
            self._remember_members()
        elif held is not None:
            data = held.encode()
            self.session.tell(SharedState(payload=Payload("u8", (len(data),))), data)

    def _remember_members(self) -> None:
        """Whom this peer knows without a coordinator, and who may be sent on to one."""
        held = self._leadership.replica.held
        if held is None:
            return
        for member in held.members:
            known = self._book.get(member.peer) is not None
            if member.standing == "member" and member.announced is not None and not known:
                self._book.add(member.announced)
        invitations = {one.id: one.public_key for one in held.invitations}
        for id in self._invitations - invitations.keys():
            self._resources.gatekeeper.deny(id)
        for id in invitations.keys() - self._invitations:
            self._resources.gatekeeper.allow(invitations[id], id)
        self._invitations = frozenset(invitations)

    def _time_recovery(self, route: Route) -> None:
        now, recovery = asyncio.get_running_loop().time(), self._assignments.recovery
        if route.ready:
            # A PC without a stage is told of nothing in between.
            recovery.ended("formed" if self._assignments.states() else "others", now)
            self.requests.until_replayed(route.model, self._replayed)
        elif route.pipeline in self._were_ready:
            recovery.noticed(now, time.time())
        if route.ready:
            self._were_ready.add(route.pipeline)
        else:
            self._were_ready.discard(route.pipeline)

    def _replayed(self) -> None:
        text = self._assignments.recovery.over(asyncio.get_running_loop().time())
        if text is not None:
            log.info("%s", text)

    async def _log_why(self, model: str) -> None:
        """Ask the coordinator why a pipeline isn't ready, once it has decided what to do."""
        try:
            await asyncio.sleep(WHY_S)
            _, text = await self.session.request_payload(StatusRequest(ref=0), timeout=3.0)
            reason = json.loads(text)["trouble"]
            if reason:
                log.info("%s is not ready: %s", model, reason)
        except MolinkError as error:
            log.info("%s is not ready, and why is not known: %s", model, error)
        finally:
            self._asking = None

    def _member_came(self, member: Member) -> None:
        self._resources.gatekeeper.allow(member.public_key)
        if self._resources.settings.stage != "none" and member.peer != self._resources.me:
            self._prober.member(member)
        self._assignments.members_changed()

    def _member_went(self, peer: str) -> None:
        # Nothing that it sends counts any more; cutting its connection cuts all others too, and
        # the command line may wait for the answer to just this.
        self._resources.gatekeeper.deny(peer)
        asyncio.get_running_loop().call_later(_CUT_DELAY_S, self._cut, peer)
        self._resources.offenders.forget(peer)
        self._store.forget(peer)
        self._prober.forget(peer)
        self._assignments.members_changed()

    def _tried(self, peer: str, reached: bool) -> None:
        self.session.tell(Reached(peer=peer, ok=reached))

    async def _reaches(self, stage: StageAddress) -> bool:
        targets = endpoints(stage.addresses, stage.port)
        resources = self._resources
        return await can_connect(
            resources.context, resources.keys, self._data_codec, stage.public_key, targets
        )

    def _trouble(self, text: str) -> None:
        self._resources.announce(Trouble(text=text))

    def _cut(self, peer: str) -> None:
        if self._book.get(peer) is None:
            self._resources.server.deny(peer)

    # --- what changes here -------------------------------------------------------------------

    def _stages_changed(self) -> None:
        self.session.report_now()
        text = self._assignments.describe()
        if text != self._said:
            self._said = text
            self._resources.announce(StageNow(text=text))

    def _models_changed(self, models: Sequence[ServedModel]) -> None:
        self.requests.serve(models)
        for model in models:
            self._announce_ready(model.name)

    def _heads_changed(self, model: str) -> None:
        self.requests.heads_changed(model)
        self._announce_ready(model)

    def _announce_ready(self, model: str) -> None:
        ready = self.requests.ready(model)
        if ready != self._ready.get(model, False):
            self._ready[model] = ready
            self._resources.announce(ModelReady(model=model, ready=ready))

    def _announce_reason(self, route: Route) -> None:
        if route.ready:
            self._reasons.pop(route.pipeline, None)
        elif route.reason and route.reason != self._reasons.get(route.pipeline):
            self._reasons[route.pipeline] = route.reason
            self._resources.announce(NotServed(model=route.model, reason=route.reason))

    def _head_said(self, pipeline: str, message: DataMessage) -> None:
        self.requests.message(pipeline, message)

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


def _bundled() -> Library:
    """The model that came with molink, so that nobody has to send it."""
    library = Library()
    try:
        library.add(DEMO_MODEL, demo_model().path)
    except MolinkError as error:
        log.info("%s", error)
    return library
