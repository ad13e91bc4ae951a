"""Which invitations hold. Of each only the public half of its key is kept."""

import math
import secrets
from collections.abc import Iterable, Iterator

from molink.errors import UsageError
from molink.swarm.records import InvitationRecord
from molink.wire.keys import KeyPair

#: How the user id of a connection under an invitation's key begins.
PREFIX = "invite:"
#: Each `molink up` makes one; beyond this many the oldest ends.
MAX_INVITATIONS = 64
_LONGEST = 10 * 365 * 86400


class Invitations:
    """Invitations by id, oldest first. Times are unix time, in seconds."""

    def __init__(self, records: Iterable[InvitationRecord] = ()) -> None:
        self._records = {record.id: record for record in records}

    def __iter__(self) -> Iterator[InvitationRecord]:
        return iter(self._records.values())

    def create(self, ttl: float, now: float) -> tuple[InvitationRecord, KeyPair]:
        """A new invitation, valid for ``ttl`` seconds (0 = for ever), and its key.

        The key's secret half goes into the token and is then forgotten.

        Raises:
            UsageError: ``ttl`` is no duration.
        """
        if not (math.isfinite(ttl) and 0 <= ttl <= _LONGEST):
            raise UsageError(f"an invitation can't be valid for {ttl} seconds")
        keys = KeyPair.generate()
        expires = math.ceil(now + ttl) if ttl else 0
        record = InvitationRecord(f"{PREFIX}{secrets.token_hex(6)}", keys.public, expires)
        self._records[record.id] = record
        return record, keys

    def holds(self, id: str, now: float) -> bool:
        """Whether somebody may join by it."""
        record = self._records.get(id)
        return record is not None and not _expired(record, now)

    def purge(self, now: float) -> list[str]:
        """Forget those that have expired or are too many; returns their ids."""
        gone = [id for id, record in self._records.items() if _expired(record, now)]
        rest = [id for id in self._records if id not in gone]
        gone += rest[: max(0, len(rest) - MAX_INVITATIONS)]
        for id in gone:
            del self._records[id]
        return gone

    def revoke(self, id: str) -> bool:
        """End one; whether there was such a one."""
        return self._records.pop(id, None) is not None


def _expired(record: InvitationRecord, now: float) -> bool:
    return record.expires != 0 and record.expires <= now
