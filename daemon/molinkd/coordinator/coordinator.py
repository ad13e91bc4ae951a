"""The coordinator: a socket, the state and a clock around the fleet.

Never in the path of a token. It can be killed at any moment: what it announced is committed, and
what runs goes on without it. An error of the state ends the process; whoever supervises it starts
it again, and it finds the swarm as it was committed.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from dataclasses import asdict

import zmq.asyncio

from molink.errors import (
    InvariantError,
    NotAuthorized,
    PortInUse,
    ShutOut,
    StateError,
)
from molink.swarm.controller.events import (
    Announce,
    Commit,
    Departed,
    Disconnected,
    Event,
    MemberAdded,
    Reported,
    Reserve,
    SendMessage,
    StageSaid,
    TermRaised,
    Tick,
    Tried,
)
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.relays import Attempted, Live, Offered, Opened
from molink.swarm.controller.status import RareOutlook, build_status, encode_status
from molink.swarm.membership.hygiene import clean_failed, clean_report
from molink.swarm.membership.token import JoinToken
from molink.swarm.membership.versions import RefusedPeers, Spoken, ours
from molink.swarm.terms import first_term
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import ControlMessage, Done
from molink.wire.messages.instructions import Revoked, Twin
from molink.wire.messages.joining import Joined, JoinRequest
from molink.wire.messages.leading import Noted, SharedState
from molink.wire.messages.relaying import RelayOpen
from molink.wire.messages.reports import (
    Goodbye,
    PeerReport,
    Reached,
    StageFailed,
    StageLoaded,
    StageReady,
)
from molink.wire.messages.requests import (
    LeaveRequest,
    StatusReply,
    StatusRequest,
)
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.server import Sender, Server
from molink.wire.sockets.zap import Gatekeeper
from molinkd.coordinator.administration import Administration, Order
from molinkd.coordinator.arguments import DEFAULT_PORT, LAST_PORT, Options, reachable_at
from molinkd.coordinator.connections import PeerConnections
from molinkd.coordinator.door import Door, guides, is_invitation, is_revoked
from molinkd.coordinator.reception import Reception
from molinkd.coordinator.relaying import RelayOffice
from molinkd.coordinator.restore import swarm_of
from molinkd.coordinator.sharing import Sharing
from molinkd.coordinator.state import State

log = logging.getLogger(__name__)

TICK = 0.25
#: What members may send; an invitation's key may send ``JoinRequest`` and nothing else.
FROM_MEMBERS = (
    PeerReport
    | SharedState
    | Reached
    | RelayOpen
    | StageLoaded
    | StageReady
    | StageFailed
    | LeaveRequest
    | Goodbye
    | StatusRequest
    | Order
)
#: A restart waits this long, in seconds, for the port that members know: Windows keeps it from
#: others while old connections linger.
_PORT_PATIENCE = 120.0 if sys.platform == "win32" else 3.0
#: Revoked members that a status shows.
_SHOWN = 64
#: What a person sets when no port is free.
_OPTION = "--coordinator-port"


class Coordinator:
    """One run of the control plane of the swarm in ``state``."""

    def __init__(
        self, context: zmq.asyncio.Context, state: State, keys: KeyPair, options: Options
    ) -> None:
        """Puts the parts together from what ``state`` holds.

        Raises:
            StateError: ``keys`` are not those of the swarm in ``state``.
            RequestError: the key of a trusted member is none.
        """
        self._state, self._keys, self._options = state, keys, options
        self.swarm = swarm_of(state, keys, options)
        state.begin_term(first_term(options.term, state.version()[0], options.leader))
        self.term = state.version()[0]
        self._gatekeeper = Gatekeeper(context)
        if options.max_peers is not None:
            state.save_max_peers(options.max_peers)
        max_peers = self.swarm.max_peers if options.max_peers is None else options.max_peers
        self.door = Door(state, self._gatekeeper, keys.public, options.members, max_peers)
        self.fleet = Fleet(
            self.swarm.id,
            self.door.records.values(),
            time.monotonic(),
            models=state.models(),
            pipelines=state.pipelines(),
            last=state.last(),
            term=self.term,
            lost=options.lost,
        )
        self._server: Server[ControlMessage] = Server(
            context,
            keys,
            control_codec(),
            self._gatekeeper,
            self._handle,
            permits=self._permits,
            on_disconnect=lambda: self._connections.one_ended(),
        )
        self._connections = PeerConnections(
            self._server, lambda peer: self._happened(Disconnected(peer))
        )
        self._relaying = RelayOffice(self._connections.tell, self._happened)
        self._sharing = Sharing(state, self.door, self._connections.tell)
        self._reception = Reception(
            options, self.swarm, self.door, self.fleet, self._connections, self._happened
        )
        self._administration = Administration(
            self.swarm.id,
            state,
            self.door,
            self.fleet,
            self._connections,
            self._happened,
            self._token,
            self._reception,
        )
        self._refused = RefusedPeers()
        self._outlook = RareOutlook(self.fleet)
        self._ticking: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] | None = None

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            PortInUse: none is free.
        """
        self._ended = asyncio.get_running_loop().create_future()
        self.door.open()
        self._gatekeeper.start()
        port = await self._bind()
        self._state.save_port(port)
        self._reception.open(port, self.addresses)
        self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="molink-tick")
        return port

    async def wait(self) -> None:
        """Wait for an error that ends this run.

        Raises:
            StateError: the state can't be written.
            InvariantError: what was decided contradicts it.
        """
        assert self._ended is not None
        await self._ended

    async def close(self) -> None:
        """Stop listening. Pipelines go on."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self._reception.close()
        self._connections.close()
        await self._server.close()
        self._gatekeeper.close()
        if self._ended is not None:
            self._ended.cancel()

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` at which peers reach it."""
        return reachable_at(self._options, self._server.port)

    @property
    def porch_port(self) -> int:
        """Where PCs without a token may knock; 0 if nowhere."""
        return self._reception.port

    def raise_term(self, term: int) -> None:
        """Go on in a higher term; what stands is not touched."""
        self._state.begin_term(term)
        self.term = term
        self._happened(TermRaised(term))

    async def _bind(self) -> int:
        host, asked, known = self._options.host, self._options.port, self.swarm.port
        if known and asked in (None, 0, known):
            deadline = time.monotonic() + _PORT_PATIENCE
            while time.monotonic() < deadline:
                with contextlib.suppress(PortInUse):
                    return self._server.bind(host, (known, known + 1))
                await asyncio.sleep(0.1)
            log.warning("port %d, which the members know, is in use by something else", known)
        if asked == 0:
            return self._server.bind(host, (0, 1), _OPTION)
        first = asked or DEFAULT_PORT
        stop = first + 1 if self._options.only_port else max(LAST_PORT, first + 10)
        return self._server.bind(host, (first, stop), _OPTION)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                self._happened(Tick(self._server.behind))
                self._relaying.handle(Live(self.fleet.registry.sessions.keys()))
                self.door.purge()
                self._reception.tick()
            except Exception:
                log.exception("a tick failed")

    # --- decisions ---------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        """Let the fleet decide, and carry its decisions out in their order."""
        if self._ended is None or self._ended.done():
            return
        try:
            for decision in self.fleet.handle(event, time.monotonic()):
                match decision:
                    case Commit():
                        self._state.commit(decision.pipeline)
                    case Reserve():
                        self._state.reserve(decision.pipeline, decision.epoch)
                    case Announce():
                        self.door.announced(decision.member)
                    case SendMessage():
                        self._connections.tell(decision.peer, decision.message)
        except (StateError, InvariantError) as error:
            # What wasn't committed must not be announced; a restart begins from what was.
            self._ended.set_exception(error)
            raise

    # --- messages ----------------------------------------------------------------------------

    def _permits(self, user: str, message: ControlMessage) -> bool:
        if is_invitation(user):
            return isinstance(message, JoinRequest)
        return isinstance(message, FROM_MEMBERS)

    def _handle(self, sender: Sender, message: ControlMessage, payload: memoryview | None) -> None:
        """Handle a message that :meth:`_permits` let through; errors become failures."""
        peer = sender.user_id
        if is_revoked(peer):
            self._turn_away(sender, message)
            return
        match message:
            case JoinRequest():
                self._join(sender, message)
            case PeerReport():
                self._report(sender, message)
            case SharedState():
                deque(map(self._happened, self._sharing.merge(peer, payload)), maxlen=0)
            case Reached():
                self._tried(peer, message)
            case RelayOpen():
                self._relaying.handle(Opened(peer, message))
            case StageFailed() | StageLoaded() | StageReady():
                said = clean_failed(message) if isinstance(message, StageFailed) else message
                self._happened(StageSaid(peer, said))
            case LeaveRequest():
                self._reply(sender, Done(ref=message.ref))
                self._administration.dismiss(peer, "left")
            case Goodbye():
                self._reply(sender, Done(ref=message.ref))
                self._connections.forget(peer)
                self._happened(Departed(peer))
            case _ if isinstance(message, Order):
                answer, text = self._administration.answer(peer, message, payload)
                self._reply(sender, answer, text)
            case StatusRequest():
                self._status(sender, message)
            case _:
                raise NotAuthorized(f"the coordinator takes no {type(message).__name__}")

    def _tried(self, peer: str, message: Reached) -> None:
        tried = Tried(peer, message.peer, message.ok, message.latency, message.rate)
        self._happened(tried)
        if message.rate is None:  # how fast a link is says nothing of what it leads over
            self._relaying.handle(Attempted(tried, message.relayed))

    def _reply(self, sender: Sender, message: ControlMessage, payload: bytes | None = None) -> None:
        self._server.send(sender.identity, message, payload)

    def _join(self, sender: Sender, message: JoinRequest) -> None:
        member = self.door.join(sender.user_id, message)
        if member.peer not in self.fleet.registry.members:
            self._happened(MemberAdded(member))
        self._reply(sender, Joined(ref=message.ref, swarm=self.swarm.id, peer=member.peer))

    def _report(self, sender: Sender, message: PeerReport) -> None:
        peer = sender.user_id
        if self._connections.is_twin(peer, sender.identity):
            self._reply(sender, Twin())
            return
        spoken = Spoken(message.version, message.protocol)
        if not self._refused.heard(peer, spoken, time.monotonic()):
            self._reply(sender, self._noted())
            return
        fresh = self._connections.heard(peer, sender.identity)
        self._connections.tell(peer, self._noted())
        self._happened(Reported(peer, clean_report(message, peer), fresh))
        self._relaying.handle(Offered(peer, message.addresses, message.relays))
        self._sharing.reported(peer, message.replica, fresh=fresh)
        if fresh:
            self._reception.tell(peer)

    def _noted(self) -> Noted:
        speaks = ours()
        return Noted(
            term=self.term,
            leader=self._options.leader,
            version=speaks.version,
            protocol=speaks.protocol,
        )

    def _token(self, secret_key: str, expires: int) -> JoinToken:
        """An invitation to this swarm, as one word."""
        return JoinToken(
            swarm=self.swarm.id,
            addresses=self.addresses,
            coordinator_key=self._keys.public,
            secret_key=secret_key,
            expires=expires,
            guides=guides(self.fleet.registry, self._options.leader),
        )

    def _turn_away(self, sender: Sender, message: ControlMessage) -> None:
        """Tell a revoked peer that it is revoked, and no more."""
        self.door.told(sender.user_id)
        if isinstance(message, PeerReport):
            self._reply(sender, Revoked(swarm=self.swarm.id))
            return
        raise ShutOut(f"this PC was shut out of swarm {self.swarm.id}")

    def _status(self, sender: Sender, message: StatusRequest) -> None:
        status = build_status(
            self.fleet,
            self.swarm.id,
            self.addresses,
            os.getpid(),
            self._gatekeeper.blocked,
            self._refused.at(time.monotonic()),
        )
        counters = self._server.counters
        shown = asdict(counters) | {"strangers": counters.strangers}
        revoked = [
            {"id": one.peer, "name": one.name}
            for one in self.door.records.values()
            if one.standing == "revoked"
        ]
        more = {
            "name": self.swarm.name,
            "term": self.term,
            "leader": self._options.leader,
            "counters": shown,
            "revoked": revoked[-_SHOWN:],
            "porch": self.porch_port,
            "time": round(time.time(), 3),
            "relays": self._relaying.shown,
            "knocks": [asdict(one) for one in self._reception.waiting],
        }
        if message.outlook:
            more["outlook"] = self._outlook.at(time.monotonic())
        text = encode_status(status | more)
        payload = Payload("u8", (len(text),))
        self._reply(sender, StatusReply(ref=message.ref, payload=payload), text)
