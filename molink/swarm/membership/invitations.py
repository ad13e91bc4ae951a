"""Invitations: validity, uses, and the rate of joins. Only public keys are stored."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from molink.errors import NotAuthorized, RequestError, TokenError, UsageError
from molink.swarm.controller.records import InvitationRecord
from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.membership_rules import LoggedInvitation
from molink.util.token_bucket import KeyedTokenBuckets, RateLimit, TokenBucket
from molink.wire.messages.membership import (
    INVITATION_PREFIX,
    MAX_USES,
    InvitationEntry,
    SignedEntry,
    sign_entry,
)
from molink.wire.signing import Signer

#: Maximum unused invitations of one member; the oldest end first, since each `molink up` creates
#: one.
MAX_INVITATIONS = 16
#: Maximum validity in seconds of an owner's invitation, unless it never expires, and of another
#: member's.
_MAX_TTL = 10 * 365 * 86400
_MAX_NON_OWNER_TTL = 30 * 86400
#: Maximum bytes of an encoded listing.
_MAX_LISTING_BYTES = 192 * 1024
_PRINT_ANOTHER = "`molink invite` on a PC of the swarm prints another"
#: Rate limits of joins by one invitation, and by all. A classroom of PCs joins within seconds; a
#: flood of invented PCs would burden all others, which are informed about each.
PER_INVITATION_LIMIT = RateLimit(8, 2.0)
OVERALL_LIMIT = RateLimit(16, 4.0)


def sign_invitation(
    swarm: str, signer: Signer, invited: Signer, ttl: float, uses: int, now: float
) -> SignedEntry:
    """Sign an invitation for ``uses`` PCs, valid for ``ttl`` seconds (0: forever).

    ``invited`` is the signer of the invitation's holder.

    Raises:
        UsageError: ``ttl`` or ``uses`` is out of range.
    """
    if not (math.isfinite(ttl) and 0 <= ttl <= _MAX_TTL):
        raise UsageError(f"an invitation can't be valid for {ttl} seconds")
    if not 1 <= uses <= MAX_USES:
        raise UsageError(f"an invitation is for 1 to {MAX_USES} PCs, not for {uses}")
    expires = math.ceil(now + ttl) if ttl else 0
    entry = InvitationEntry(signer.verify_key, invited.verify_key, now, expires, uses)
    return sign_entry(swarm, signer, entry)


def check_lifetime(entry: InvitationEntry, now: float, *, owner: bool) -> None:
    """Check that a member, or an owner, may create an invitation with this validity.

    Raises:
        NotAuthorized: only an owner may.
        RequestError: it has expired.
    """
    if entry.expires_at and entry.expires_at <= now:
        raise RequestError("this invitation has expired already")
    if not owner and not 0 < entry.expires_at <= now + _MAX_NON_OWNER_TTL + 60.0:
        raise NotAuthorized.owner_only(
            f"create an invitation for more than {_MAX_NON_OWNER_TTL // 86400} days"
        )


def check_use(record: InvitationRecord | None, peer: str, now: float) -> None:
    """Check that ``peer`` may join by an invitation; it may reuse one that it has used before.

    Raises:
        TokenError: the invitation has expired or is used up.
    """
    if record is None or _is_expired(record, now):
        raise TokenError(f"this join token has expired. {_PRINT_ANOTHER}")
    if record.uses_left < 1 and all(use.peer != peer for use in record.used_by):
        uses = record.max_uses
        pcs = "1 PC, which has" if uses == 1 else f"{uses} PCs, which have"
        raise TokenError(f"this join token was for {pcs} joined. {_PRINT_ANOTHER}")


def find_excess(log: MembershipLog, creator: str, now: float) -> list[LoggedInvitation]:
    """Return a member's oldest open invitation if it has :data:`MAX_INVITATIONS` or more."""
    open_ones = [
        one
        for one in log.invitations
        if one.creator == creator and not one.is_ended and not one.joins
        if not 0 < one.entry.expires_at <= now
    ]
    return open_ones[: max(0, len(open_ones) - MAX_INVITATIONS + 1)]


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
        """Count a join and return 0, or return the seconds after which to retry."""
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
    """Encode ``molink invite --list --json`` (UTF-8); drop the oldest if it is too long."""
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
