"""The coordinator: a socket, the state and a clock around the reconciler.

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
from dataclasses import asdict

import zmq.asyncio

from molink.errors import InvariantError, NotAuthorized, PortInUse, RequestError, StateError
from molink.swarm.events import (
    Announce,
    Commit,
    Departed,
    Event,
    MemberAdded,
    MemberRemoved,
    Reported,
    SendMessage,
    Serve,
    StageSaid,
    Tick,
)
from molink.swarm.hygiene import (
    clean_failed,
    clean_name,
    clean_report,
    is_model_name,
)
from molink.swarm.reconciler import Reconciler
from molink.swarm.records import Desired, Standing, SwarmRecord
from molink.swarm.status import build_status, encode_status
from molink.swarm.token import JoinToken
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import (
    ControlMessage,
    Done,
    Goodbye,
    Invite,
    InviteRequest,
    Joined,
    JoinRequest,
    LeaveRequest,
    PeerReport,
    RevokeRequest,
    ServeModel,
    StageFailed,
    StageLoaded,
    StageReady,
    StatusReply,
    StatusRequest,
)
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.server import Sender, Server
from molink.wire.sockets.zap import Gatekeeper
from molinkd.coordinator.arguments import DEFAULT_PORT, LAST_PORT, Options, reachable_at
from molinkd.coordinator.door import Door, is_invitation
from molinkd.coordinator.state import State

log = logging.getLogger(__name__)

TICK = 0.25
#: What members may send; an invitation's key may send ``JoinRequest`` and nothing else.
FROM_MEMBERS = (
    PeerReport
    | StageLoaded
    | StageReady
    | StageFailed
    | ServeModel
    | InviteRequest
    | LeaveRequest
    | Goodbye
    | RevokeRequest
    | StatusRequest
)
#: A restart waits this long, in seconds, for the port that members know: Windows keeps it from
#: others while old connections linger.
_PORT_PATIENCE = 120.0 if sys.platform == "win32" else 3.0
#: Until an answer is out, before connections are cut.
_CUT_DELAY = 0.2
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
        self.swarm = _swarm_of(state, keys, options)
        self._gatekeeper = Gatekeeper(context)
        self.door = Door(state, self._gatekeeper, keys.public, options.members)
        self.reconciler = Reconciler(
            self.swarm.id,
            self.door.records.values(),
            time.monotonic(),
            desired=state.desired(),
            pipeline=state.pipeline(),
            last=state.last(),
        )
        self._server: Server[ControlMessage] = Server(
            context, keys, control_codec(), self._gatekeeper, self._handle, permits=self._permits
        )
        #: The connection that each peer was last heard on.
        self._connections: dict[str, bytes] = {}
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
        await self._server.close()
        self._gatekeeper.close()
        if self._ended is not None:
            self._ended.cancel()

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` at which peers reach it."""
        return reachable_at(self._options, self._server.port)

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
        return self._server.bind(host, (first, max(LAST_PORT, first + 10)), _OPTION)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                self._happened(Tick())
                self.door.purge()
            except Exception:
                log.exception("a tick failed")

    # --- decisions ---------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        """Let the reconciler decide, and carry its decisions out in their order."""
        if self._ended is None or self._ended.done():
            return
        try:
            for decision in self.reconciler.handle(event, time.monotonic()):
                match decision:
                    case Commit():
                        self._state.commit(decision.pipeline)
                    case Announce():
                        self._state.save_announced(decision.member)
                    case SendMessage():
                        self._tell(decision.peer, decision.message)
        except (StateError, InvariantError) as error:
            # What wasn't committed must not be announced; a restart begins from what was.
            self._ended.set_exception(error)
            raise

    def _tell(self, peer: str, message: ControlMessage) -> None:
        identity = self._connections.get(peer)
        try:
            if identity is None or not self._server.send(identity, message):
                log.info("%s was not told a %s", peer, type(message).__name__)
        except Exception:
            log.exception("can't tell %s a %s", peer, type(message).__name__)

    # --- messages ----------------------------------------------------------------------------

    def _permits(self, user: str, message: ControlMessage) -> bool:
        if is_invitation(user):
            return isinstance(message, JoinRequest)
        return isinstance(message, FROM_MEMBERS)

    def _handle(self, sender: Sender, message: ControlMessage, _payload: memoryview | None) -> None:
        """Handle a message that :meth:`_permits` let through; errors become failures."""
        peer = sender.user_id
        match message:
            case JoinRequest():
                self._join(sender, message)
            case PeerReport():
                self._report(sender, message)
            case StageFailed():
                self._happened(StageSaid(peer, clean_failed(message)))
            case StageLoaded() | StageReady():
                self._happened(StageSaid(peer, message))
            case ServeModel():
                self._serve(sender, message)
            case InviteRequest():
                self._invite(sender, message)
            case LeaveRequest():
                self._reply(sender, Done(ref=message.ref))
                self._dismiss(peer, "left")
            case Goodbye():
                self._reply(sender, Done(ref=message.ref))
                self._connections.pop(peer, None)
                self._happened(Departed(peer))
            case RevokeRequest():
                self._revoke(sender, message)
            case StatusRequest():
                self._status(sender, message)
            case _:
                raise NotAuthorized(f"the coordinator takes no {type(message).__name__}")

    def _reply(self, sender: Sender, message: ControlMessage, payload: bytes | None = None) -> None:
        self._server.send(sender.identity, message, payload)

    def _join(self, sender: Sender, message: JoinRequest) -> None:
        member = self.door.join(sender.user_id, message)
        if member.peer not in self.reconciler.registry.members:
            self._happened(MemberAdded(member))
        self._reply(sender, Joined(ref=message.ref, swarm=self.swarm.id, peer=member.peer))

    def _report(self, sender: Sender, message: PeerReport) -> None:
        peer = sender.user_id
        fresh = self._connections.get(peer) != sender.identity
        self._connections[peer] = sender.identity
        self._happened(Reported(peer, clean_report(message, peer), fresh))

    def _serve(self, sender: Sender, message: ServeModel) -> None:
        self._check_order(sender.user_id, message.model.name)
        desired = Desired(
            facts=message.model,
            source=sender.user_id,
            min_peers=message.min_peers,
            dtype=message.dtype,
            micro_batches=message.micro_batches,
            quantize=message.quantize,
        )
        self._state.save_desired(desired)
        self._happened(Serve(desired))
        self._reply(sender, Done(ref=message.ref))

    def _check_order(self, peer: str, model: str) -> None:
        """Owners decide what is served; another member only where nothing is, or again its own."""
        if not is_model_name(model):
            raise RequestError("a model's name has to be printable text", param="model")
        served = self.reconciler.desired
        if served is None or self.door.records[peer].owner:
            return
        if (served.source, served.facts.name) != (peer, model):
            raise NotAuthorized(
                f"the swarm serves {served.facts.name}; only the PC that runs it can have it serve "
                "another model (`molink up --model …` there)"
            )

    def _invite(self, sender: Sender, message: InviteRequest) -> None:
        secret, expires = self.door.invite(sender.user_id, message.ttl)
        token = JoinToken(
            swarm=self.swarm.id,
            addresses=self.addresses,
            coordinator_key=self._keys.public,
            secret_key=secret,
            expires=expires,
        )
        self._reply(sender, Invite(ref=message.ref, token=str(token)))

    def _revoke(self, sender: Sender, message: RevokeRequest) -> None:
        if not self.door.records[sender.user_id].owner:
            raise NotAuthorized("only the PC that runs the swarm may revoke")
        target = message.target
        if is_invitation(target):
            self.door.revoke_invitation(target)
        elif target == sender.user_id or target not in self.reconciler.registry.members:
            raise RequestError(f"{target} is no other member", param="target")
        else:
            self._dismiss(target, "revoked")
            # Nothing that it sends counts any more; its connection is cut once this is answered.
            asyncio.get_running_loop().call_later(_CUT_DELAY, self._cut, target)
        self._reply(sender, Done(ref=message.ref))

    def _cut(self, peer: str) -> None:
        if self.door.records[peer].standing != "member":
            self._server.deny(peer)

    def _dismiss(self, peer: str, standing: Standing) -> None:
        self.door.dismiss(peer, standing)
        self._connections.pop(peer, None)
        self._happened(MemberRemoved(peer, "left" if standing == "left" else "was revoked"))

    def _status(self, sender: Sender, message: StatusRequest) -> None:
        status = build_status(
            self.reconciler,
            self.swarm.id,
            self.addresses,
            os.getpid(),
            self._gatekeeper.blocked,
        )
        counters = self._server.counters
        shown = asdict(counters) | {"strangers": counters.strangers}
        text = encode_status(status | {"name": self.swarm.name, "counters": shown})
        payload = Payload("u8", (len(text),))
        self._reply(sender, StatusReply(ref=message.ref, payload=payload), text)


def _swarm_of(state: State, keys: KeyPair, options: Options) -> SwarmRecord:
    """The swarm that the state holds; a new one if it holds none."""
    swarm = state.swarm()
    if swarm is None:
        name = clean_name(options.name, "molink")
        swarm = SwarmRecord(os.urandom(8).hex(), name, keys.public)
        state.create_swarm(swarm)
    if swarm.public_key != keys.public:
        raise StateError(
            f"{state.path} belongs to a coordinator with another key: restore the key file beside "
            "it, or delete both to begin a new swarm"
        )
    return swarm
