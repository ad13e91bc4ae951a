"""Invitations: validity, uses, and the rate of joins. Only public keys are stored."""

import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from molink.errors import NotAuthorized, TokenError, UsageError
from molink.swarm.controller.records import InvitationRecord, InvitationUse
from molink.util.token_bucket import KeyedTokenBuckets, RateLimit, TokenBucket

#: Prefix of the ZAP user id of connections under an invitation's key.
INVITATION_PREFIX = "invite:"
#: Invitations of one member; the oldest end first, since each `molink up` creates one. Used-up ones
#: count separately: a PC whose reply was lost joins again with its own.
MAX_INVITATIONS = 16
#: Longest validity in seconds: of an owner's that expires at all, and of another member's.
_MAX_TTL = 10 * 365 * 86400
_MAX_NON_OWNER_TTL = 30 * 86400
#: Most PCs that one invitation can admit.
MAX_USES = 255
#: Bytes of an encoded listing.
_MAX_LISTING_BYTES = 192 * 1024
_PRINT_ANOTHER = "`molink invite` on a PC of the swarm prints another"
#: Joins by one invitation, and by all. A classroom of PCs joins within seconds; a flood of invented
#: ones would cost all others, which are told of each.
PER_INVITATION_LIMIT = RateLimit(8, 2.0)
OVERALL_LIMIT = RateLimit(16, 4.0)


class Invitations:
    """Invitations by id, oldest first. Times are unix time, in seconds."""

    def __init__(self, records: Iterable[InvitationRecord] = ()) -> None:
        self._records = {record.id: record for record in records}

    def __iter__(self) -> Iterator[InvitationRecord]:
        return iter(self._records.values())

    def get_invitation(self, id: str) -> InvitationRecord | None:
        """The invitation with that id."""
        return self._records.get(id)

    def create_invitation(
        self, creator: str, public_key: str, ttl: float, now: float, *, owner: bool, uses: int = 1
    ) -> InvitationRecord:
        """Create an invitation for ``uses`` PCs, valid for ``ttl`` seconds (0: forever).

        Raises:
            UsageError: ``ttl`` or ``uses`` is out of range.
            NotAuthorized: only an owner may create one that is valid for so long.
        """
        if not (math.isfinite(ttl) and 0 <= ttl <= _MAX_TTL):
            raise UsageError(f"an invitation can't be valid for {ttl} seconds")
        if not 1 <= uses <= MAX_USES:
            raise UsageError(f"an invitation is for 1 to {MAX_USES} PCs, not for {uses}")
        if not owner and not 0 < ttl <= _MAX_NON_OWNER_TTL:
            raise NotAuthorized(
                "only the swarm's first PC can create an invitation for more than "
                f"{_MAX_NON_OWNER_TTL // 86400} days"
            )
        expires = math.ceil(now + ttl) if ttl else 0
        id = f"{INVITATION_PREFIX}{secrets.token_hex(6)}"
        record = InvitationRecord(id, public_key, expires, creator, now, uses)
        self.put_record(record)
        return record

    def put_record(self, record: InvitationRecord) -> None:
        """Store a record, replacing an earlier one of the same id."""
        self._records[record.id] = record

    def redeem_invitation(self, id: str, peer: str, now: float) -> InvitationRecord:
        """The record after ``peer`` has joined by it; the caller stores it.

        A peer may join again by an invitation that it used before.

        Raises:
            TokenError: it has expired or is used up.
        """
        record = self._records.get(id)
        if record is None or _is_expired(record, now):
            raise TokenError(f"this join token has expired. {_PRINT_ANOTHER}")
        if any(use.peer == peer for use in record.used_by):
            return record
        if record.uses_left < 1:
            uses = record.max_uses
            pcs = "1 PC, which has" if uses == 1 else f"{uses} PCs, which have"
            raise TokenError(f"this join token was for {pcs} joined. {_PRINT_ANOTHER}")
        return replace(record, used_by=(*record.used_by, InvitationUse(peer, now)))

    def purge_expired(self, now: float) -> list[str]:
        """Remove expired and excess invitations; returns their ids."""
        expired: list[str] = []
        counts: Counter[tuple[str, bool]] = Counter()
        for id, record in reversed(self._records.items()):
            kind = (record.creator, record.uses_left > 0)
            if not _is_expired(record, now) and counts[kind] < MAX_INVITATIONS:
                counts[kind] += 1
            else:
                expired.append(id)
        for id in expired:
            del self._records[id]
        return expired

    def created_by(self, peer: str) -> list[str]:
        """Ids of the invitations that ``peer`` created."""
        return [record.id for record in self if record.creator == peer]

    def redeemed_by(self, peer: str) -> list[str]:
        """Ids of the invitations by which ``peer`` joined."""
        return [record.id for record in self if any(use.peer == peer for use in record.used_by)]

    def revoke_invitation(self, id: str) -> bool:
        """Remove an invitation; returns whether it existed."""
        return self._records.pop(id, None) is not None


class JoinRateLimiter:
    """Limits joins by one invitation and by all."""

    def __init__(
        self,
        now: float,
        per_invitation: RateLimit = PER_INVITATION_LIMIT,
        overall: RateLimit = OVERALL_LIMIT,
    ) -> None:
        self._buckets = KeyedTokenBuckets(per_invitation)
        self._overall = TokenBucket(overall, now)

    def admit_join(self, invitation: str, now: float) -> float:
        """Count a join and return 0, or the seconds after which to retry."""
        own = self._buckets.bucket_for(invitation, now)
        wait = max(own.wait_time(now), self._overall.wait_time(now))
        if wait == 0.0:
            own.take_token()
            self._overall.take_token()
        return wait

    def drop_invitation(self, invitation: str) -> None:
        """Drop the bucket of an invitation that has ended."""
        self._buckets.drop_key(invitation)


def encode_invitations(
    invitations: Sequence[InvitationRecord], name_of: Callable[[str], str]
) -> bytes:
    """``molink invite --list --json`` (UTF-8), without the oldest if it is too long."""
    text = json.dumps([_to_json(record, name_of) for record in invitations]).encode("utf-8")
    if len(text) <= _MAX_LISTING_BYTES:
        return text
    return encode_invitations(invitations[(len(invitations) + 1) // 2 :], name_of)


def _to_json(record: InvitationRecord, name_of: Callable[[str], str]) -> dict[str, Any]:
    return {
        "id": record.id.removeprefix(INVITATION_PREFIX),
        "created": record.created_at,
        "expires": record.expires_at,
        "uses": record.max_uses,
        "left": record.uses_left,
        "creator": {"peer": record.creator, "name": name_of(record.creator)},
        "used": [
            {"peer": use.peer, "name": name_of(use.peer), "at": use.used_at}
            for use in record.used_by
        ],
    }


def _is_expired(record: InvitationRecord, now: float) -> bool:
    return record.expires_at != 0 and record.expires_at <= now
