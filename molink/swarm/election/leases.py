"""Leases: a coordinator's signed proofs of life, which other peers can pass on.

A coordinator signs a lease with each heartbeat. A peer learns the key from the coordinator to which
it is connected, and estimates the coordinator's clock. So a candidate can verify whether others
hear its leader. Each run of a coordinator has its own key, so leases of an earlier run are invalid.
"""

import msgspec

from molink.util.timeouts import TIMEOUTS
from molink.util.token_bucket import KeyedTokenBuckets, RateLimit
from molink.wire.messages.election import Lease
from molink.wire.signing import Signer, is_signed_by

#: Seconds by which message delays may age a lease, in addition to the leader's timeout.
LEASE_SLACK = 0.5
#: Rate limit of checks of one peer's leases; a check takes about 0.1 ms.
_CHECK_LIMIT = RateLimit(burst=16, per_second=4.0)
_PURPOSE = b"lease"


def _encode_lease(term: int, leader: str, clock: int) -> bytes:
    return msgspec.msgpack.encode((term, leader, clock))


class LeaseIssuer:
    """Signs the leases of one run of a coordinator."""

    def __init__(self, leader: str, seed: str, now: float) -> None:
        """``seed`` is drawn for this run; ``now`` is monotonic seconds."""
        self._leader = leader
        self._signer = Signer(seed)
        self._started_at = now
        #: The key that verifies the leases.
        self.verify_key = self._signer.verify_key

    def issue_lease(self, term: int, now: float) -> Lease:
        """Sign a lease for ``term``."""
        clock = round(1000 * (now - self._started_at))
        signature = self._signer.sign(_PURPOSE, _encode_lease(term, self._leader, clock))
        return Lease(term=term, leader=self._leader, clock=clock, signature=signature)


class LeaseChecker:
    """Keeps the last lease of one leader, and checks leases that others hold. Times are seconds."""

    def __init__(self) -> None:
        #: The leader whose leases can be checked; empty if there is none.
        self.leader = ""
        #: The last lease that this leader sent to this peer.
        self.lease: Lease | None = None
        self._verify_key = ""
        #: The coordinator's clock at a time of this peer's clock.
        self._clock, self._clock_at = 0.0, 0.0
        self._checks = KeyedTokenBuckets(_CHECK_LIMIT)

    def on_heartbeat(self, leader: str, lease: Lease, verify_key: str, now: float) -> None:
        """Handle a lease sent by the leader's coordinator itself."""
        if verify_key != self._verify_key:
            self._clock, self._clock_at = 0.0, now
        self.leader, self.lease, self._verify_key = leader, lease, verify_key
        self._advance_clock(lease.clock, now)

    def check_lease(self, peer: str, lease: Lease | None, term: int, now: float) -> bool:
        """Whether a peer's lease proves that :attr:`leader` lives, in ``term`` or a later one."""
        if lease is None or lease.leader != self.leader or lease.term < term:
            return False
        if not self.is_fresh(lease, now) or not self._checks.try_take(peer, now):
            return False
        data = _encode_lease(lease.term, lease.leader, lease.clock)
        if not is_signed_by(self._verify_key, _PURPOSE, data, lease.signature):
            return False
        self._advance_clock(lease.clock, now)
        return True

    def is_fresh(self, lease: Lease, now: float) -> bool:
        """Whether a lease of :attr:`leader` is recent."""
        return now - self.find_time(lease) <= TIMEOUTS.leader + LEASE_SLACK

    def find_time(self, lease: Lease) -> float:
        """Return when a lease was signed, by this peer's clock."""
        return self._clock_at + lease.clock / 1000 - self._clock

    def drop_peer(self, peer: str) -> None:
        """Drop a former member."""
        self._checks.drop_key(peer)

    def _advance_clock(self, clock: int, now: float) -> None:
        """Advance the estimated clock: a lease is never ahead of the coordinator's clock."""
        self._clock = max(clock / 1000, self._clock + now - self._clock_at)
        self._clock_at = now
