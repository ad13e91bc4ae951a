"""The session with the coordinator: this peer's reports out, orders in.

It reconnects indefinitely. Every report is complete, so a broken connection loses nothing.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq.asyncio

from molink.errors import MessageTooLarge, MolinkError
from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.versions import PeerVersion, explain_mismatch, own_version
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.election import LeaderHeartbeat
from molink.wire.messages.instructions import KeepAlive, Welcome
from molink.wire.messages.peer_reports import Goodbye, PeerReport
from molink.wire.messages.rendezvous import COORDINATOR
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.membership.membership_requests import (
    NO_MEETING_POINT,
    MeetingPoint,
    MembershipRequest,
    send_membership_request,
)
from molinkd.peer.membership.rendezvous_client import RendezvousClient
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
#: Consecutive refused handshakes that are reported; a starting or stopping coordinator may refuse a
#: few.
MAX_REFUSALS = 4
#: Timeout of the goodbye, in seconds.
GOODBYE_TIMEOUT_S = 0.5


class CoordinatorSession:
    """This peer's side of the control plane."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        membership: MembershipRecord,
        report: Callable[[], PeerReport],
        on_message: Callable[[ControlMessage, memoryview | None], None],
        on_welcome: Callable[[], None],
        on_refused: Callable[[str], None],
        on_noted: Callable[[LeaderHeartbeat], bool] = lambda _: True,
        on_cut: Callable[[], None] = lambda: None,
        rendezvous: RendezvousClient | None = None,
    ) -> None:
        """``on_refused(reason)`` is called once when the coordinator keeps refusing this peer.

        ``on_noted`` is called for a heartbeat and returns whether to follow that coordinator;
        ``on_cut`` is called when the connection is lost.
        """
        self._context, self._keys, self._swarm = context, keys, membership.swarm
        self._rendezvous, self._leader = rendezvous, ""
        self._report = report
        self._on_message = on_message
        self._on_welcome = on_welcome
        self._on_refused = on_refused
        self._on_heartbeat = on_noted
        self._on_connection_lost = on_cut
        self._client = self._make_client(membership)
        self._closing: set[asyncio.Task[None]] = set()
        self._reporter: asyncio.Task[None] | None = None
        self._last_refusal = ""
        #: Consecutive refused handshakes.
        self._refusals = 0
        self._is_ending = False
        #: This PC's own membership log.
        self.find_log: Callable[[], MembershipLog | None] = lambda: None
        #: Whether the coordinator has welcomed this connection.
        self.is_welcomed = False
        #: Whether to follow the connected coordinator.
        self._is_obeyed = False
        #: Version mismatch with the coordinator; empty if compatible.
        self._version_mismatch = ""
        #: Whether a welcome was ignored because the coordinator was not followed then.
        self._missed_welcome = False

    def _make_client(self, membership: MembershipRecord) -> Client[ControlMessage]:
        self._target = self._find_target(membership)
        self._leader = membership.leader_to_call
        return Client(
            self._context,
            self._keys,
            control_codec(),
            *self._target,
            name="the swarm's coordinator",
            events=ClientEvents(
                on_message=self._handle_message,
                on_connect=self._on_connected,
                on_disconnect=self._on_disconnected,
                on_refused=self._on_refusal,
            ),
        )

    def _find_target(self, membership: MembershipRecord) -> tuple[str, tuple[str, ...]]:
        """Key and endpoints of the coordinator, best first."""
        endpoints, rendezvous = membership.endpoints, self._rendezvous
        if rendezvous is not None:
            leader = membership.leader_to_call
            endpoints = rendezvous.add_endpoint(endpoints, leader, COORDINATOR)
        return membership.coordinator_key, endpoints

    def follow_coordinator(self, membership: MembershipRecord) -> None:
        """Connect to another coordinator."""
        if self._find_target(membership) == self._target:
            return
        before, self._client = self._client, self._make_client(membership)
        self.is_welcomed, self._refusals, self._last_refusal = False, 0, ""
        if self._reporter is None:
            return  # not started yet
        leaving = asyncio.get_running_loop().create_task(before.close())
        self._closing.add(leaving)
        leaving.add_done_callback(self._closing.discard)
        self._client.start()

    def start(self) -> None:
        """Start connecting."""
        self._client.start()
        self._reporter = asyncio.get_running_loop().create_task(
            self._send_reports(), name="molink-reports"
        )

    async def send_goodbye(self) -> None:
        """Stop reporting, and notify the coordinator if connected."""
        self._is_ending = True
        if not self.is_welcomed:
            return
        try:
            await self._client.send_request(Goodbye(ref=0), timeout=GOODBYE_TIMEOUT_S)
        except MolinkError as error:
            log.info("can't say goodbye to the coordinator: %s", error)

    async def close(self) -> None:
        """Disconnect."""
        await cancel_tasks(self._reporter)
        await self._client.close()
        await asyncio.gather(*self._closing)

    @property
    def failure_reason(self) -> str:
        """Why there is no connection, as text; empty if there is one."""
        if self._client.is_connected:
            return self._version_mismatch
        return self._last_refusal or "the coordinator doesn't answer"

    def send_message(self, message: ControlMessage, payload: bytes | None = None) -> None:
        """Send if welcomed; otherwise the next session's reports contain the information."""
        if not self.is_welcomed or self._is_ending:
            return
        try:
            self._client.send(message, payload)
        except MolinkError as error:
            log.info("can't send to the coordinator: %s", error)

    async def request(self, message: ControlMessage, timeout: float = 10.0) -> ControlMessage:
        """Send a request; an error reply is raised as the error that it names.

        Requests about members are signed here.
        """
        return (await self.request_payload(message, timeout))[0]

    async def request_payload(
        self, message: ControlMessage, timeout: float = 10.0, payload: bytes | None = None
    ) -> tuple[ControlMessage, bytes]:
        """:meth:`request` with payloads."""

        async def ask(one: ControlMessage) -> tuple[ControlMessage, bytes]:
            reply, answer = await self._client.send_request(one, payload, timeout=timeout)
            return reply, b"" if answer is None else bytes(answer)

        if isinstance(message, MembershipRequest):
            keys, key, known = self._keys, self._target[0], self.find_log()
            reply = await send_membership_request(
                message, keys, self._swarm, key, ask, known, self._meeting_point
            )
            return reply, b""
        return await ask(message)

    @property
    def _meeting_point(self) -> MeetingPoint:
        if self._rendezvous is None:
            return NO_MEETING_POINT
        return MeetingPoint(str(self._rendezvous.address), self._leader)

    def _on_connected(self) -> None:
        self._last_refusal = ""
        self._refusals = 0
        self._is_obeyed = self._missed_welcome = False
        self.report_now()

    def _on_disconnected(self) -> None:
        self.is_welcomed = False
        log.warning("lost the connection to the coordinator; reconnecting")
        self._on_connection_lost()

    def _on_refusal(self, reason: str) -> None:
        if reason != self._last_refusal:
            log.warning("%s", reason)
            self._last_refusal = reason
        self._refusals += 1
        if self._refusals == MAX_REFUSALS:
            self._on_refused(reason)

    def _handle_message(self, message: ControlMessage, payload: memoryview | None) -> None:
        if not self._client.is_connected:
            return  # came over a connection that was replaced
        match message:
            case LeaderHeartbeat():
                self._check_version(PeerVersion(message.version, message.protocol))
                self._is_obeyed = self._on_heartbeat(message) and not self._version_mismatch
                if self._is_obeyed and self._missed_welcome:
                    # It leads after all, in a higher term. Its earlier messages were ignored, so
                    # reconnect.
                    self._missed_welcome = False
                    self._client.reconnect_now()
            case KeepAlive():
                pass
            case Welcome() if self._is_obeyed:
                self.is_welcomed = True
                self._on_welcome()
            case Welcome():
                self._missed_welcome = True
            case _ if self.is_welcomed:
                self._on_message(message, payload)
            case _:
                log.debug("ignored %s before the welcome", type(message).__name__)

    def _check_version(self, coordinator: PeerVersion) -> None:
        """Check whether the coordinator's version is compatible; reports a mismatch once."""
        unlike = explain_mismatch(own_version(), coordinator)
        if unlike and unlike != self._version_mismatch:
            log.warning("%s", unlike)
            self._on_refused(unlike)
        self._version_mismatch = unlike

    def report_now(self) -> None:
        """Send a report immediately."""
        if self._is_ending or not self._client.is_connected:
            return
        report = self._report()
        try:
            try:
                self._client.send(report)
            except MessageTooLarge:
                self._client.send(msgspec.structs.replace(report, load=None))
        except MolinkError as error:
            log.debug("no report: %s", error)

    async def _send_reports(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            self.report_now()
