"""Which invitations hold. Of each only the public half of its key is kept."""

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator

from molink.errors import NotAuthorized, UsageError
from molink.swarm.records import InvitationRecord

#: How the user id of a connection under an invitation's key begins.
PREFIX = "invite:"
#: Each `molink up` makes one; beyond this many of one member its oldest ends.
MAX_INVITATIONS = 16
#: Longest validity of an owner's, unless it is for ever, and of any other member's, in seconds.
_MAX_TTL = 10 * 365 * 86400
_MAX_TTL_OF_OTHERS = 30 * 86400


class Invitations:
    """Invitations by id, oldest first. Times are unix time, in seconds."""

    def __init__(self, records: Iterable[InvitationRecord] = ()) -> None:
        self._records = {record.id: record for record in records}

    def __iter__(self) -> Iterator[InvitationRecord]:
        return iter(self._records.values())

    def create(
        self, creator: str, public_key: str, ttl: float, now: float, *, owner: bool
    ) -> InvitationRecord:
        """A new invitation by ``creator``, valid for ``ttl`` seconds (0 = for ever).

        The secret half of its key goes into the token and is then forgotten.

        Raises:
            UsageError: ``ttl`` is no duration.
            NotAuthorized: it is longer than an invitation by one who is no owner may be.
        """
        if not (math.isfinite(ttl) and 0 <= ttl <= _MAX_TTL):
            raise UsageError(f"an invitation can't be valid for {ttl} seconds")
        if not owner and not 0 < ttl <= _MAX_TTL_OF_OTHERS:
            raise NotAuthorized(
                f"an invitation for more than {_MAX_TTL_OF_OTHERS // 86400} days can only be made "
                "on the PC that runs the swarm"
            )
        expires = math.ceil(now + ttl) if ttl else 0
        id = f"{PREFIX}{secrets.token_hex(6)}"
        record = InvitationRecord(id, public_key, expires, creator)
        self._records[record.id] = record
        return record

    def holds(self, id: str, now: float) -> bool:
        """Whether somebody may join by it."""
        record = self._records.get(id)
        return record is not None and not _expired(record, now)

    def purge(self, now: float) -> list[str]:
        """Forget those that have expired or are too many; returns their ids."""
        gone: list[str] = []
        held: Counter[str] = Counter()
        for id, record in reversed(self._records.items()):
            if not _expired(record, now) and held[record.creator] < MAX_INVITATIONS:
                held[record.creator] += 1
            else:
                gone.append(id)
        for id in gone:
            del self._records[id]
        return gone

    def of(self, creator: str) -> list[str]:
        """Ids of those that ``creator`` has made."""
        return [record.id for record in self if record.creator == creator]

    def revoke(self, id: str) -> bool:
        """End one; whether there was such a one."""
        return self._records.pop(id, None) is not None


def _expired(record: InvitationRecord, now: float) -> bool:
    return record.expires != 0 and record.expires <= now
