"""Which invitations hold, and for whom. Of each only the public half of its key is kept."""

import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from molink.errors import NotAuthorized, TokenError, UsageError
from molink.swarm.controller.records import InvitationRecord, InvitationUse

#: How the user id of a connection under an invitation's key begins.
INVITATION_PREFIX = "invite:"
#: Each `molink up` makes one; beyond this many of one member its oldest ends. Those that are used
#: up count apart: a PC whose answer was lost comes again with such a one.
MAX_INVITATIONS = 16
#: Longest validity of an owner's, unless it is for ever, and of any other member's, in seconds.
_MAX_TTL = 10 * 365 * 86400
_MAX_NON_OWNER_TTL = 30 * 86400
#: PCs that one invitation may be for.
MAX_USES = 255
#: Bound of a listing, in bytes.
_MAX_LISTING_BYTES = 192 * 1024


class Invitations:
    """Invitations by id, oldest first. Times are unix time, in seconds."""

    def __init__(self, records: Iterable[InvitationRecord] = ()) -> None:
        self._records = {record.id: record for record in records}

    def __iter__(self) -> Iterator[InvitationRecord]:
        return iter(self._records.values())

    def get_invitation(self, id: str) -> InvitationRecord | None:
        """That one, if there is such a one."""
        return self._records.get(id)

    def create_invitation(
        self, creator: str, public_key: str, ttl: float, now: float, *, owner: bool, uses: int = 1
    ) -> InvitationRecord:
        """A new invitation by ``creator`` for ``uses`` PCs, valid for ``ttl`` s (0 = for ever).

        The secret half of its key goes into the token and is then forgotten.

        Raises:
            UsageError: ``ttl`` is no duration, or ``uses`` no number of PCs.
            NotAuthorized: it is longer than an invitation by one who is no owner may be.
        """
        if not (math.isfinite(ttl) and 0 <= ttl <= _MAX_TTL):
            raise UsageError(f"an invitation can't be valid for {ttl} seconds")
        if not 1 <= uses <= MAX_USES:
            raise UsageError(f"an invitation is for 1 to {MAX_USES} PCs, not for {uses}")
        if not owner and not 0 < ttl <= _MAX_NON_OWNER_TTL:
            raise NotAuthorized(
                f"an invitation for more than {_MAX_NON_OWNER_TTL // 86400} days can only be made "
                "on the swarm's first PC"
            )
        expires = math.ceil(now + ttl) if ttl else 0
        id = f"{INVITATION_PREFIX}{secrets.token_hex(6)}"
        record = InvitationRecord(id, public_key, expires, creator, now, uses)
        self.put_record(record)
        return record

    def put_record(self, record: InvitationRecord) -> None:
        """Remember it, in the place of an earlier record of it."""
        self._records[record.id] = record

    def redeem_invitation(self, id: str, peer: str, now: float) -> InvitationRecord:
        """The invitation once ``peer`` has joined by it; nothing is remembered yet.

        A peer that has joined by it before may do so again, and that counts once.

        Raises:
            TokenError: it does not hold any more, or was for as many PCs as have joined by it.
        """
        record = self._records.get(id)
        if record is None or _is_expired(record, now):
            raise TokenError(
                "this join token has expired: ask for a new one, which `molink invite` prints on a "
                "PC of the swarm"
            )
        if any(use.peer == peer for use in record.used_by):
            return record
        if record.uses_left < 1:
            pcs = (
                "one PC, which has"
                if record.max_uses == 1
                else f"{record.max_uses} PCs, which have"
            )
            raise TokenError(
                f"this join token was for {pcs} joined by it. `molink invite` on a PC of the swarm "
                "prints another"
            )
        return replace(record, used_by=(*record.used_by, InvitationUse(peer, now)))

    def purge_expired(self, now: float) -> list[str]:
        """Forget those that have expired or are too many; returns their ids."""
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
        """Ids of those that ``peer`` has made."""
        return [record.id for record in self if record.creator == peer]

    def redeemed_by(self, peer: str) -> list[str]:
        """Ids of those that ``peer`` has joined by."""
        return [record.id for record in self if any(use.peer == peer for use in record.used_by)]

    def revoke_invitation(self, id: str) -> bool:
        """End one; whether there was such a one."""
        return self._records.pop(id, None) is not None


def encode_invitations(
    invitations: Sequence[InvitationRecord], name_of: Callable[[str], str]
) -> bytes:
    """``molink invite --list --json`` (UTF-8); the oldest are left out where that is too long.

    ``name_of`` has the names of peers, by their ids.
    """
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
