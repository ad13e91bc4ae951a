"""A peer in its swarm: everything that follows from what the coordinator says."""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq.asyncio

import molink
from molink.checkpoint.source import DEMO_MODEL, demo_model
from molink.errors import MolinkError
from molink.facts.identity import peer_id
from molink.swarm.address_book import AddressBook
from molink.swarm.offenders import Offenders
from molink.swarm.stream import StreamLimits
from molink.wire.messages.control import (
    Assign,
    ControlMessage,
    Form,
    Invite,
    InviteRequest,
    LeaveRequest,
    Member,
    MemberGone,
    PeerReport,
    Prefetch,
    RevokeRequest,
    Route,
    RouteGone,
    StageProfile,
    StatusRequest,
    Unassign,
)
from molink.wire.messages.data import DataMessage
from molink.wire.messages.pipe import MemberKey
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.server import Server
from molink.wire.sockets.zap import Gatekeeper
from molinkd.api.backend import Figures, ServedModel
from molinkd.peer.addresses import advertised
from molinkd.peer.assignments import Assignments
from molinkd.peer.device_probe import Measured
from molinkd.peer.heads import Heads
from molinkd.peer.home import Home
from molinkd.peer.launch import Announce, ModelReady, NotServed, StageNow, Trouble
from molinkd.peer.library import Library
from molinkd.peer.local_status import local_status
from molinkd.peer.membership import Membership
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
        self, resources: Resources, membership: Membership, endpoint: Callable[[], str]
    ) -> None:
        """``endpoint()`` is the URL of this peer's endpoint."""
        self._resources = resources
        self._membership = membership
        self._endpoint = endpoint
        self._ready: dict[str, bool] = {}
        self._said = ""
        self._left = False
        #: Per pipeline, why it isn't ready, as announced last.
        self._reasons: dict[str, str] = {}
        self._asking: asyncio.Task[None] | None = None
        self._sweep: asyncio.TimerHandle | None = None
        settings, context, keys = resources.settings, resources.context, resources.keys
        self._book = AddressBook(MemberKey(peer=resources.me, public_key=keys.public))
        self._book.on_member = self._member_came
        self._book.on_gone = self._member_went
        connect = Sources(context, keys, self._book).connect
        self._store = Store(
            resources.home.models, resources.me, resources.library, connect, _bundled()
        )
        self.session = CoordinatorSession(
            context, keys, membership, self._report, self._take, self._welcomed
        )
        self._assignments = Assignments(
            settings,
            keys,
            self._store,
            self._book,
            resources.home,
            self.session.tell,
            self._stages_changed,
            resources.offenders.blocked,
        )
        self._heads = Heads(context, keys, self._heads_changed, self._head_said)
        limits = StreamLimits(hold_s=settings.hold)
        self.requests = Requests(self._heads, limits, self._metrics)
        self._served = ServedModels(self._store, self._models_changed, self._trouble)

    def start(self, measured: Measured) -> None:
        """Begin to report to the coordinator and to do what it says."""
        self._measured = measured
        self._assignments.measured(measured)
        self.session.start()

    async def goodbye(self) -> None:
        """Have the others go on without this peer, before anything of it ends."""
        # Our own coordinator ends with us: what runs is not to be placed anew for that moment.
        if not self._membership.own and not self._left:
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
        await self._served.close()
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
                self._membership, self._resources.me, self._report(), routes, reason, usable
            )
        return self._resources.offenders.shown_in(text)

    async def invite(self, ttl: float) -> str:
        """A new join token, valid for ``ttl`` seconds."""
        reply = await self.session.request(InviteRequest(ref=0, ttl=ttl))
        assert isinstance(reply, Invite)
        return reply.token

    async def revoke(self, target: str) -> None:
        """Have the coordinator shut a peer out, or end an invitation."""
        await self.session.request(RevokeRequest(ref=0, target=target))

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
        )

    def _welcomed(self) -> None:
        self._book.welcomed()
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._book.sweep)
        self._assignments.repeat()

    def _take(self, message: ControlMessage) -> None:
        match message:
            case Member():
                if not self._book.add(message):
                    log.warning("the coordinator announces a member by another's id")
            case MemberGone():
                self._book.remove(message.peer)
            case Prefetch() | Assign() | StageProfile() | Form() | Unassign():
                self._assignments.handle(message)
            case Route():
                self._heads.update(message)
                self._served.update(message)
                self._announce_reason(message)
                if not message.ready and self._asking is None:
                    loop = asyncio.get_running_loop()
                    self._asking = loop.create_task(self._log_why(message.model))
            case RouteGone():
                self._heads.remove(message.pipeline)
                self._reasons.pop(message.pipeline, None)
                self._served.remove(message.pipeline)
            case _:
                log.debug("unexpected %s of the coordinator", type(message).__name__)

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
        self._assignments.members_changed()

    def _member_went(self, peer: str) -> None:
        # Nothing that it sends counts any more; cutting its connection cuts all others too, and
        # the command line may wait for the answer to just this.
        self._resources.gatekeeper.deny(peer)
        asyncio.get_running_loop().call_later(_CUT_DELAY_S, self._cut, peer)
        self._resources.offenders.forget(peer)
        self._assignments.members_changed()

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
