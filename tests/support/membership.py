"""Peers with keys, and a membership log that they sign."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from molink.facts.identity import derive_peer_id
from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.membership import (
    AdmissionEntry,
    DepartureEntry,
    Founder,
    InvitationEndEntry,
    InvitationEntry,
    JoinEntry,
    OwnershipEntry,
    ReadmissionEntry,
    RevocationEntry,
    SignedEntry,
    Statement,
    sign_entry,
)
from molink.wire.sockets.key_pair import KeyPair


@dataclass(frozen=True)
class TestPeer:
    """A peer by its keys."""

    __test__ = False

    keys: KeyPair = field(default_factory=KeyPair.generate)
    name: str = "pc"

    @property
    def peer(self) -> str:
        return derive_peer_id(self.keys.public)

    @property
    def verify_key(self) -> str:
        return self.keys.signer.verify_key


class LogBuilder:
    """A log that grows; each method signs one entry and returns it."""

    def __init__(self, *founders: TestPeer) -> None:
        self.founders = founders or (TestPeer(name="founder"),)
        self.log = MembershipLog.found_swarm(
            [Founder(one.verify_key, one.name) for one in self.founders], b"n" * 16
        )

    @property
    def founder(self) -> TestPeer:
        return self.founders[0]

    def sign(self, by: KeyPair, entry: Statement) -> SignedEntry:
        return sign_entry(self.log.swarm, by.signer, entry)

    def append(self, by: KeyPair, entry: Statement) -> SignedEntry:
        signed = self.sign(by, entry)
        self.log = self.log.with_entries([signed])
        return signed

    def invite(
        self, by: TestPeer, uses: int = 1, expires_at: int = 0, created_at: float = 1.0
    ) -> tuple[KeyPair, SignedEntry]:
        keys = KeyPair.generate()
        entry = InvitationEntry(by.verify_key, keys.signer.verify_key, created_at, expires_at, uses)
        return keys, self.append(by.keys, entry)

    def join(self, invitation: KeyPair, peer: TestPeer, at: float = 2.0) -> SignedEntry:
        key = invitation.signer.verify_key
        return self.append(invitation, JoinEntry(key, peer.verify_key, peer.name, at))

    def admit(self, by: TestPeer, *peers: TestPeer) -> SignedEntry:
        for peer in peers:
            entry = self.append(
                by.keys, AdmissionEntry(by.verify_key, peer.verify_key, peer.name, 2.0)
            )
        return entry

    def leave(self, peer: TestPeer) -> SignedEntry:
        of = self.log.members[peer.peer].admission
        return self.append(peer.keys, DepartureEntry(peer.verify_key, of))

    def revoke(self, by: TestPeer, peer: TestPeer) -> SignedEntry:
        return self.append(by.keys, RevocationEntry(by.verify_key, peer.peer, 3.0))

    def readmit(self, by: TestPeer, revocation: SignedEntry) -> SignedEntry:
        return self.append(by.keys, ReadmissionEntry(by.verify_key, revocation.hash))

    def end(self, by: TestPeer, invitation: SignedEntry, *kept: TestPeer) -> SignedEntry:
        peers = tuple(one.peer for one in kept)
        return self.append(by.keys, InvitationEndEntry(by.verify_key, invitation.hash, peers))

    def own(self, by: TestPeer, peer: TestPeer) -> SignedEntry:
        return self.append(by.keys, OwnershipEntry(by.verify_key, peer.peer))

    def standing(self, *peers: TestPeer) -> list[str]:
        known = self.log.members
        return [known[one.peer].standing if one.peer in known else "unknown" for one in peers]


def names_of(log: MembershipLog, peers: Iterable[str]) -> list[str]:
    """Names of peers, in the order of the log."""
    chosen = set(peers)
    return [one.name for one in log.members.values() if one.peer in chosen]
