"""Keys of the PCs, and the membership log of a simulated swarm."""

from collections.abc import Collection, Sequence
from functools import cache

from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.membership import DepartureEntry, RevocationEntry, sign_entry
from molink.wire.sockets.key_pair import KeyPair
from tests.dst.process import Pc
from tests.support.membership import LogBuilder, TestPeer


@cache
def peer_of(name: str) -> TestPeer:
    """The peer on the PC of that name, in every seed with the same keys."""
    return TestPeer(KeyPair.from_seed((name * 40)[:40]), name)


def found_swarm(pcs: Sequence[Pc], liars: Collection[Pc]) -> MembershipLog:
    """The log of a swarm of these PCs: the first honest one owns it, and the liars are a branch."""
    return _found_swarm(tuple((pc.name, pc in liars) for pc in pcs))


@cache
def _found_swarm(pcs: tuple[tuple[str, bool], ...]) -> MembershipLog:
    owner = next(peer_of(name) for name, lies in pcs if not lies)
    members, first_liar = LogBuilder(owner), None
    for name, lies in pcs:
        peer = peer_of(name)
        if peer is owner:
            continue
        members.admit(first_liar if lies and first_liar is not None else owner, peer)
        if lies and first_liar is None:
            first_liar = peer
    return members.log


def leave(log: MembershipLog, peer: TestPeer) -> MembershipLog:
    """The log after a PC has left."""
    entry = DepartureEntry(peer.verify_key, log.members[peer.peer].admission)
    return log.with_entries([sign_entry(log.swarm, peer.keys.signer, entry)])


def revoke(log: MembershipLog, peer: TestPeer, now: float) -> MembershipLog:
    """The log after the owner has shut a PC out, with those that it let in."""
    owner = next(peer_of(one.name) for one in log.members.values() if one.is_owner)
    entry = RevocationEntry(owner.verify_key, peer.peer, now)
    return log.with_entries([sign_entry(log.swarm, owner.keys.signer, entry)])
