"""Requests of this PC's user about the swarm's members: signed here, then sent to the coordinator.

The coordinator stores and distributes entries of the membership log, but can't make them.
"""

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from molink.errors import NotAuthorized, RequestError, WireError
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.invitations import find_excess, sign_invitation
from molink.swarm.membership.join_token import ContactPoint, JoinToken
from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.membership_rules import LoggedInvitation
from molink.wire.messages.admin import (
    AddOwnerRequest,
    AppendEntries,
    InviteReply,
    InviteRequest,
    LeaveRequest,
    LogReply,
    LogRequest,
    PairingDecisionReply,
    PairingDecisionRequest,
    RenameRequest,
    RevokeReply,
    RevokeRequest,
    UnrevokeRequest,
)
from molink.wire.messages.control_plane import ControlMessage, DoneReply
from molink.wire.messages.membership import (
    INVITATION_PREFIX,
    AdmissionEntry,
    DepartureEntry,
    InvitationEndEntry,
    NameEntry,
    OwnershipEntry,
    ReadmissionEntry,
    RevocationEntry,
    SignedEntry,
    Statement,
    peer_of_key,
    sign_entry,
)
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator.options import format_address

#: Sends a request to the coordinator; returns its reply and the payload.
AskCoordinator = Callable[[ControlMessage], Awaitable[tuple[ControlMessage, bytes]]]
MembershipRequest = (
    InviteRequest
    | RevokeRequest
    | UnrevokeRequest
    | AddOwnerRequest
    | PairingDecisionRequest
    | RenameRequest
    | LeaveRequest
)


class MeetingPoint(NamedTuple):
    """The rendezvous of this PC, and the peer to call there; both empty without one."""

    rendezvous: str
    leader: str


NO_MEETING_POINT = MeetingPoint("", "")


async def send_membership_request(
    request: MembershipRequest,
    keys: KeyPair,
    swarm: str,
    coordinator_key: str,
    ask: AskCoordinator,
    known: MembershipLog | None = None,
    meeting: MeetingPoint = NO_MEETING_POINT,
) -> ControlMessage:
    """Carry out a request for the swarm of that id; returns the reply for the user.

    ``known`` is this PC's own log, since a coordinator may hide entries. ``meeting`` is for tokens.

    Raises:
        MolinkError: it can't be done, or the coordinator refuses.
    """
    requester = _Requester(keys, swarm, coordinator_key, ask, known, meeting)
    return await requester.carry_out(request)


class _Requester:
    def __init__(
        self,
        keys: KeyPair,
        swarm: str,
        coordinator_key: str,
        ask: AskCoordinator,
        known: MembershipLog | None,
        meeting: MeetingPoint,
    ) -> None:
        self._signer, self._swarm, self._ask = keys.signer, swarm, ask
        self._meeting = meeting
        self._coordinator_key, self._known = coordinator_key, known
        self._me = derive_peer_id(keys.public)

    async def carry_out(self, request: MembershipRequest) -> ControlMessage:
        if isinstance(request, PairingDecisionRequest):
            return await self._decide_pairing(request)
        if isinstance(request, RenameRequest):
            await self._append(
                self._sign(NameEntry(self._signer.verify_key, request.name[:64], time.time()))
            )
            return DoneReply(ref=request.ref)
        log, location = await self._fetch_log()
        match request:
            case InviteRequest():
                return await self._invite(request, log, location)
            case RevokeRequest() if request.target.startswith(INVITATION_PREFIX):
                return await self._end_invitation(request, log)
            case RevokeRequest():
                return await self._revoke_peer(request, log)
            case UnrevokeRequest():
                return await self._readmit_peer(request, log)
            case AddOwnerRequest():
                return await self._add_owner(request, log)
            case LeaveRequest():
                return await self._leave(request, log)

    async def _fetch_log(self) -> tuple[MembershipLog, LogReply]:
        location, payload = await self._ask(LogRequest(ref=0))
        if not isinstance(location, LogReply):
            raise WireError(f"unexpected reply {type(location).__name__} instead of the log")
        log = MembershipLog.decode(self._swarm, payload)
        return (log if self._known is None else log.merge_log(self._known)), location

    async def _append(self, *entries: SignedEntry, code: str = "") -> None:
        await self._ask(AppendEntries(ref=0, entries=entries, code=code))

    def _sign(self, entry: Statement) -> SignedEntry:
        return sign_entry(self._swarm, self._signer, entry)

    async def _invite(
        self, request: InviteRequest, log: MembershipLog, location: LogReply
    ) -> InviteReply:
        now, invited = time.time(), KeyPair.generate()
        made = sign_invitation(
            self._swarm, self._signer, invited.signer, request.ttl, request.uses, now
        )
        ends = [self._end(one) for one in find_excess(log, self._me, now)]
        await self._append(*ends[:31], made)
        (found,) = [one for one in log.with_entries([made]).invitations if one.hash == made.hash]
        contacts = tuple(
            ContactPoint(
                one.public_key, tuple(format_address(host, one.control_port) for host in addresses)
            )
            for one in location.contacts
            if (addresses := one.addresses)
        )
        token = JoinToken(
            swarm=self._swarm,
            addresses=location.addresses,
            coordinator_key=self._coordinator_key,
            secret_key=invited.seed,
            expires=found.entry.expires_at,
            contact_points=contacts,
            rendezvous=self._meeting.rendezvous,
            leader=self._meeting.leader,
        )
        return InviteReply(ref=request.ref, token=str(token), id=found.id)

    def _end(self, invitation: LoggedInvitation, *left: str) -> SignedEntry:
        """End an invitation; who joined by it stays, but for the peers in ``left``."""
        joined = dict.fromkeys(peer_of_key(join.verify_key) for _, join in invitation.joins)
        kept = tuple(peer for peer in joined if peer not in left)
        return self._sign(InvitationEndEntry(self._signer.verify_key, invitation.hash, kept))

    async def _end_invitation(self, request: RevokeRequest, log: MembershipLog) -> RevokeReply:
        found = [one for one in log.invitations if one.id == request.target and not one.is_ended]
        if self._me not in log.owners and (not found or found[0].creator != self._me):
            raise NotAuthorized.owner_only("revoke another PC's invitation")
        if not found:
            raise RequestError(f"there is no invitation {request.target}", param="target")
        await self._append(self._end(found[0]))
        return RevokeReply(ref=request.ref, kept_peers=_names_by(log, found[0]))

    async def _revoke_peer(self, request: RevokeRequest, log: MembershipLog) -> RevokeReply:
        if self._me not in log.owners:
            raise NotAuthorized.owner_only("revoke a PC")
        member = log.find_named(request.target)
        if member is None or member.peer == self._me or member.standing != "member":
            raise RequestError(
                f"the swarm has no other member {request.target}; `molink status` lists them",
                param="target",
            )
        peer = member.peer
        entry = RevocationEntry(self._signer.verify_key, peer, time.time())
        entries = [self._sign(entry)]
        # It may still hold the token by which it joined.
        joined_by = [
            one for one in log.invitations if one.id == member.invitation and not one.is_ended
        ]
        entries += [self._end(one) for one in joined_by]
        await self._append(*entries)
        after = log.with_entries(entries)
        return RevokeReply(
            ref=request.ref,
            kept_peers=tuple(name for one in joined_by for name in _names_by(after, one)),
            ended_peers=tuple(
                one.name
                for one in log.members.values()
                if one.standing == "member" and one.peer != peer and not after.is_member(one.peer)
            ),
        )

    async def _readmit_peer(self, request: UnrevokeRequest, log: MembershipLog) -> DoneReply:
        if self._me not in log.owners:
            raise NotAuthorized.owner_only("readmit a PC")
        member = log.find_named(request.target)
        if member is None or member.standing != "revoked":
            raise RequestError(f"{request.target} was not revoked", param="target")
        key, revocations = self._signer.verify_key, log.revocations_of(member.peer)
        entries = [self._sign(ReadmissionEntry(key, one)) for one in revocations]
        if not log.with_entries(entries).is_member(member.peer):
            adopted = AdmissionEntry(key, member.verify_key, member.own_name, time.time())
            entries.append(self._sign(adopted))
        await self._append(*entries)
        return DoneReply(ref=request.ref)

    async def _add_owner(self, request: AddOwnerRequest, log: MembershipLog) -> DoneReply:
        if self._me not in log.owners:
            raise NotAuthorized.owner_only("make another PC an owner")
        member = log.find_named(request.target)
        if member is None or member.standing != "member" or member.is_owner:
            raise RequestError(
                f"{request.target} is no other member, or an owner already", param="target"
            )
        await self._append(self._sign(OwnershipEntry(self._signer.verify_key, member.peer)))
        return DoneReply(ref=request.ref)

    async def _decide_pairing(self, request: PairingDecisionRequest) -> PairingDecisionReply:
        reply, _ = await self._ask(request)
        if not isinstance(reply, PairingDecisionReply):
            raise WireError(f"unexpected reply {type(reply).__name__} to a decision")
        if not request.refuse:
            entry = AdmissionEntry(
                self._signer.verify_key, reply.verify_key, reply.name[:64], time.time()
            )
            await self._append(self._sign(entry), code=request.code)
            log, _ = await self._fetch_log()
            if (member := log.members.get(peer_of_key(reply.verify_key))) is not None:
                reply = msgspec.structs.replace(reply, name=member.name)
        return reply

    async def _leave(self, request: LeaveRequest, log: MembershipLog) -> DoneReply:
        """Leave with this PC's further devices, which joined by its own invitations."""
        member = log.members.get(self._me)
        if member is None or not member.admission:
            return DoneReply(ref=request.ref)  # who founded a swarm stays its owner
        entries = [self._sign(DepartureEntry(self._signer.verify_key, member.admission))]
        for one in log.invitations:
            if one.creator == self._me and not one.is_ended:
                entries.append(self._end(one, *request.devices))
        await self._append(*entries[:32])
        return DoneReply(ref=request.ref)


def _names_by(log: MembershipLog, invitation: LoggedInvitation) -> tuple[str, ...]:
    """Names of the members that joined by an invitation."""
    joined = {peer_of_key(join.verify_key) for _, join in invitation.joins}
    return tuple(log.members[peer].name for peer in log.branches if peer in joined)
