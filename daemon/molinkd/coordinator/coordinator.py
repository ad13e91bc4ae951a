"""The coordinator: the control plane's socket, state and timer around the fleet.

It is never in the path of a token. It may be killed at any moment: everything announced is
committed, and running pipelines continue without it. A state error ends the process; its
supervisor restarts it from the committed state.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from dataclasses import asdict

import zmq.asyncio
from msgspec import UNSET, structs

from molink.errors import (
    InvariantError,
    NotAuthorized,
    PeerBanned,
    PortInUse,
    StateError,
)
from molink.swarm.controller.estimates import CachedEstimates
from molink.swarm.controller.events import (
    AnnouncePeerAction,
    CommitPipelineAction,
    ConnectionTriedEvent,
    ControllerEvent,
    PeerDisconnectedEvent,
    PeerReportedEvent,
    PeerStoppedEvent,
    ReserveEpochAction,
    SendMessageAction,
    StageReportedEvent,
    TermRaisedEvent,
    TimePassedEvent,
)
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.relays import (
    LivePeersChangedEvent,
    RelayOfferedEvent,
    RelayOpenedEvent,
    RouteTriedEvent,
)
from molink.swarm.controller.status import build_status, encode_status
from molink.swarm.controller.status_schema import PairingStatus, RevokedPeerStatus
from molink.swarm.election.leases import LeaseIssuer
from molink.swarm.election.terms import first_term
from molink.swarm.membership.sanitize import sanitize_failure, sanitize_report
from molink.swarm.membership.versions import IncompatiblePeers, PeerVersion, own_version
from molink.wire.messages.admin import StatusReply, StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage, DoneReply, JoinReply, JoinRequest
from molink.wire.messages.election import LeaderHeartbeat, StateReplica
from molink.wire.messages.instructions import DuplicatePeer
from molink.wire.messages.peer_reports import (
    Goodbye,
    PeerReport,
    ReachReport,
    StageFailed,
    StageLoaded,
    StageReady,
)
from molink.wire.messages.relay import RelayOpened
from molink.wire.messages.rendezvous import is_place
from molink.wire.signing import generate_seed
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.coordinator.admin import AdminHandler, AdminRequest
from molinkd.coordinator.connections import PeerConnections
from molinkd.coordinator.membership import (
    Membership,
    is_invitation_id,
    is_revoked_id,
)
from molinkd.coordinator.options import (
    DEFAULT_PORT,
    LAST_PORT,
    CoordinatorOptions,
    advertised_addresses,
)
from molinkd.coordinator.pairing_service import PairingService
from molinkd.coordinator.relay_service import RelayService
from molinkd.coordinator.restore import load_or_create_swarm
from molinkd.coordinator.state_replicator import StateReplicator
from molinkd.coordinator.state_store import StateStore

log = logging.getLogger(__name__)

TIMER_INTERVAL = 0.25
#: Messages that members may send; an invitation's key may only send ``JoinRequest``.
MEMBER_MESSAGES = (
    PeerReport
    | StateReplica
    | ReachReport
    | RelayOpened
    | StageLoaded
    | StageReady
    | StageFailed
    | Goodbye
    | StatusRequest
    | AdminRequest
)
#: Seconds for which a restart waits for its old port; Windows blocks it while old connections
#: linger.
_PORT_WAIT = 120.0 if sys.platform == "win32" else 3.0
#: Revoked members in a status.
_MAX_REVOKED_SHOWN = 64
#: Option to set if no port is free.
_PORT_OPTION = "--coordinator-port"


class Coordinator:
    """One run of the control plane of the swarm in ``state``."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        state: StateStore,
        keys: KeyPair,
        options: CoordinatorOptions,
    ) -> None:
        """Build the control plane from ``state``.

        Raises:
            StateError: ``keys`` are not those of the swarm in ``state``.
            RequestError: the key of a trusted member is invalid.
        """
        self._state, self._keys, self._options = state, keys, options
        self.swarm = load_or_create_swarm(state, keys, options)
        state.begin_term(first_term(options.term, state.read_version()[0], options.leader))
        self.term = state.read_version()[0]
        self._leases = LeaseIssuer(options.leader, generate_seed(), time.monotonic())
        self._authenticator = ZapAuthenticator(context)
        if options.max_peers is not None:
            state.save_max_peers(options.max_peers)
        max_peers = self.swarm.max_peers if options.max_peers is None else options.max_peers
        self.membership = Membership(state, self._authenticator, max_peers)
        self.fleet = Fleet(
            self.swarm.id,
            self.membership.records.values(),
            time.monotonic(),
            models=state.read_models(),
            pipelines=state.read_pipelines(),
            last=state.last_numbers(),
            term=self.term,
            lost_peer=options.lost_peer,
        )
        self._server: Server[ControlMessage] = Server(
            context,
            keys,
            control_codec(),
            self._authenticator,
            self._on_message,
            permits=self._is_permitted,
            on_disconnect=lambda: self._connections.on_disconnect(),
        )
        self._connections = PeerConnections(
            self._server, lambda peer: self._dispatch_event(PeerDisconnectedEvent(peer))
        )
        self._relays = RelayService(self._connections.send_to_peer, self._dispatch_event)
        self._replicator = StateReplicator(state, self.membership, self._connections.send_to_peer)
        self._pairing = PairingService(
            options,
            self.swarm,
            self.membership,
            self.fleet,
            self._connections,
        )
        self._admin = AdminHandler(
            state,
            self.membership,
            self.fleet,
            self._connections,
            self._dispatch_event,
            self._replicator.send_state,
            lambda: self.addresses,
            options.leader,
            self._pairing,
        )
        self._incompatible = IncompatiblePeers()
        self._estimates = CachedEstimates(self.fleet)
        self._timer_task: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None] | None = None

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            PortInUse: none is free.
        """
        self._failure = asyncio.get_running_loop().create_future()
        self.membership.authorize_all()
        self._authenticator.start()
        port = await self._bind_port()
        self._state.save_port(port)
        self._pairing.open(port, self.addresses)
        self._timer_task = asyncio.get_running_loop().create_task(
            self._run_timer(), name="molink-timer"
        )
        return port

    async def wait_for_failure(self) -> None:
        """Wait for an error that ends this run.

        Raises:
            StateError: the state can't be written.
            InvariantError: an action contradicts the state.
        """
        assert self._failure is not None
        await self._failure

    async def close(self) -> None:
        """Stop listening; pipelines keep running."""
        if self._timer_task is not None:
            self._timer_task.cancel()
            await asyncio.gather(self._timer_task, return_exceptions=True)
        await self._pairing.close()
        self._connections.close()
        await self._server.close()
        self._authenticator.close()
        if self._failure is not None:
            self._failure.cancel()

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` at which peers reach it."""
        return advertised_addresses(self._options, self._server.port)

    @property
    def pairing_port(self) -> int:
        """Port of the pairing listener; 0 without one."""
        return self._pairing.port

    def raise_term(self, term: int) -> None:
        """Continue in a higher term; connections and pipelines stay.

        A term that can't be stored ends this run: its heartbeats would be of a term that is over.
        """
        try:
            self._state.begin_term(term)
        except StateError as error:
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
            return
        self.term = term
        self._dispatch_event(TermRaisedEvent(term))

    async def _bind_port(self) -> int:
        host, asked, known_port = self._options.host, self._options.port, self.swarm.port
        if known_port and asked in (None, 0, known_port):
            deadline = time.monotonic() + _PORT_WAIT
            while time.monotonic() < deadline:
                with contextlib.suppress(PortInUse):
                    return self._server.bind(host, (known_port, known_port + 1))
                await asyncio.sleep(0.1)
            log.warning("the members' known port %d is in use by another program", known_port)
        if asked == 0:
            return self._server.bind(host, (0, 1), _PORT_OPTION)
        first = asked or DEFAULT_PORT
        stop = first + 1 if self._options.only_port else max(LAST_PORT, first + 10)
        return self._server.bind(host, (first, stop), _PORT_OPTION)

    async def _run_timer(self) -> None:
        while True:
            await asyncio.sleep(TIMER_INTERVAL)
            try:
                self._dispatch_event(TimePassedEvent(self._server.is_behind))
                self._relays.handle(LivePeersChangedEvent(self.fleet.registry.sessions.keys()))
                self.membership.purge_expired()
                self._pairing.on_timer()
            except Exception:
                log.exception("the timer's work failed")

    # --- decisions ---------------------------------------------------------------------------

    def _dispatch_event(self, event: ControllerEvent) -> None:
        """Handle an event in the fleet and carry out the actions, in order."""
        if self._failure is None or self._failure.done():
            return
        try:
            for action in self.fleet.handle(event, time.monotonic()):
                match action:
                    case CommitPipelineAction():
                        self._state.commit_pipeline(action.pipeline)
                    case ReserveEpochAction():
                        self._state.reserve_epoch(action.pipeline, action.epoch)
                    case AnnouncePeerAction():
                        self.membership.record_announcement(action.member)
                    case SendMessageAction():
                        self._connections.send_to_peer(action.peer, action.message)
        except (StateError, InvariantError) as error:
            # Uncommitted actions must not be announced; a restart begins from the committed state.
            self._failure.set_exception(error)
            raise

    # --- messages ----------------------------------------------------------------------------

    def _is_permitted(self, user: str, message: ControlMessage) -> bool:
        if is_invitation_id(user):
            return isinstance(message, JoinRequest)
        return isinstance(message, MEMBER_MESSAGES)

    def _on_message(
        self, sender: MessageSender, message: ControlMessage, payload: memoryview | None
    ) -> None:
        """Handle a permitted message; the server turns errors into replies."""
        peer = sender.peer_id
        if is_revoked_id(peer):
            self._refuse_revoked(sender, message)
            return
        match message:
            case JoinRequest():
                self._on_join(sender, message)
            case PeerReport():
                self._on_report(sender, message)
            case StateReplica():
                self._admin.apply_change(self._replicator.merge_state(peer, payload))
            case ReachReport():
                self._on_reach_report(peer, message)
            case RelayOpened():
                self._relays.handle(RelayOpenedEvent(peer, message))
            case StageFailed() | StageLoaded() | StageReady():
                said = sanitize_failure(message) if isinstance(message, StageFailed) else message
                self._dispatch_event(StageReportedEvent(peer, said))
            case Goodbye():
                self._reply(sender, DoneReply(ref=message.ref))
                self._connections.drop_peer(peer)
                self._dispatch_event(PeerStoppedEvent(peer))
            case _ if isinstance(message, AdminRequest):
                answer, text = self._admin.handle_request(peer, message, payload)
                self._reply(sender, answer, text)
            case StatusRequest():
                self._send_status(sender, message)
            case _:
                raise NotAuthorized(f"the coordinator does not accept {type(message).__name__}")

    def _on_reach_report(self, peer: str, message: ReachReport) -> None:
        tried = ConnectionTriedEvent(
            peer,
            message.peer,
            message.is_reachable,
            message.latency,
            message.rate,
            message.loss,
        )
        if not (message.failed_relay or message.tried_relay):  # they count once a relay is replaced
            self._dispatch_event(tried)
        if message.rate is None and message.loss is None:  # these say nothing about the route
            self._relays.handle(
                RouteTriedEvent(
                    tried,
                    message.is_relayed,
                    message.is_punched,
                    message.failed_relay,
                    message.tried_relay,
                )
            )

    def _reply(
        self, sender: MessageSender, message: ControlMessage, payload: bytes | None = None
    ) -> None:
        self._server.send(sender.identity, message, payload)

    def _on_join(self, sender: MessageSender, message: JoinRequest) -> None:
        member, change = self.membership.join_by_invitation(sender.peer_id, message)
        self._admin.apply_change(change)
        self._reply(sender, JoinReply(ref=message.ref, swarm=self.swarm.id, peer=member.peer))

    def _on_report(self, sender: MessageSender, message: PeerReport) -> None:
        peer = sender.peer_id
        if self._connections.is_duplicate(peer, sender.identity):
            self._reply(sender, DuplicatePeer())
            return
        peer_version = PeerVersion(message.version, message.protocol)
        if not self._incompatible.check_version(peer, peer_version, time.monotonic()):
            self._reply(sender, self._leader_heartbeat())
            return
        is_new = self._connections.update_connection(peer, sender.identity)
        self._connections.send_to_peer(peer, self._leader_heartbeat())
        report = sanitize_report(message, peer, self.membership.records[peer].name)
        self._dispatch_event(PeerReportedEvent(peer, report, is_new))
        place = message.rendezvous if is_place(message.rendezvous) else ""
        offer = RelayOfferedEvent(peer, message.addresses, message.can_relay, place)
        self._relays.handle(offer)
        self._replicator.on_peer_report(peer, message.replica, message.log_digest, is_new=is_new)
        if is_new:
            self._pairing.notify_peer(peer)

    def _leader_heartbeat(self) -> LeaderHeartbeat:
        version = own_version()
        return LeaderHeartbeat(
            term=self.term,
            leader=self._options.leader,
            version=version.version,
            protocol=version.protocol,
            lease=self._leases.issue_lease(self.term, time.monotonic()),
            verify_key=self._leases.verify_key,
        )

    def _refuse_revoked(self, sender: MessageSender, message: ControlMessage) -> None:
        """Tell a revoked peer so, and nothing else."""
        self.membership.mark_notified(sender.peer_id)
        if isinstance(message, PeerReport):
            self._reply(sender, *self.membership.prove_revoked())
            return
        raise PeerBanned(f"this PC was removed from swarm {self.swarm.id}")

    def _send_status(self, sender: MessageSender, message: StatusRequest) -> None:
        status = build_status(
            self.fleet,
            self.swarm.id,
            self.addresses,
            os.getpid(),
            self._authenticator.blocked,
            self._incompatible.list_active(time.monotonic()),
        )
        counters = self._server.counters
        revoked = [
            RevokedPeerStatus(one.peer, one.name)
            for one in self.membership.records.values()
            if one.standing == "revoked"
        ]
        now = time.monotonic()
        status = structs.replace(
            status,
            name=self.swarm.name,
            term=self.term,
            leader=self._options.leader,
            counters=asdict(counters) | {"strangers": counters.unauthenticated},
            revoked=tuple(revoked[-_MAX_REVOKED_SHOWN:]),
            pairing_port=self.pairing_port,
            time=round(time.time(), 3),
            relays=tuple(self._relays.routes),
            pairing_requests=tuple(
                PairingStatus(one.name, one.code, one.address, one.since)
                for one in self._pairing.pending_requests
            ),
            scale_out=self._estimates.estimate_at(now) if message.scale_out else UNSET,
        )
        text = encode_status(status)
        payload = Payload("u8", (len(text),))
        self._reply(sender, StatusReply(ref=message.ref, payload=payload), text)
