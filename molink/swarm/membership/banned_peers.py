"""Members that a socket of this PC has cut off because they misbehaved."""

import json
from typing import Any

#: The oldest are forgotten beyond this many: a person reads the list.
_MAX_ENTRIES = 32


class BannedPeers:
    """Who was cut off, where and why; until it is no member any more."""

    def __init__(self) -> None:
        #: (peer, where) → reason.
        self._reasons: dict[tuple[str, str], str] = {}

    def record_ban(self, socket_name: str, peer: str, reason: str) -> None:
        """A socket (``where``, for a person) has cut ``peer`` off."""
        self._reasons.pop((peer, socket_name), None)
        self._reasons[peer, socket_name] = reason[:200]
        if len(self._reasons) > _MAX_ENTRIES:
            del self._reasons[next(iter(self._reasons))]

    def drop_peer(self, peer: str) -> None:
        """That peer is no member any more."""
        self._reasons = {key: reason for key, reason in self._reasons.items() if key[0] != peer}

    def add_to_status(self, status: bytes) -> bytes:
        """``molink status --json`` (UTF-8) with these members under ``banned_peers``."""
        if not self._reasons:
            return status
        shown: dict[str, Any] = json.loads(status)
        names = {peer["id"]: peer["name"] for peer in shown["peers"]}
        shown["banned_peers"] = [
            {
                "peer": peer,
                "name": names.get(peer, peer),
                "banned_by": socket_name,
                "reason": reason,
            }
            for (peer, socket_name), reason in self._reasons.items()
        ]
        return json.dumps(shown).encode("utf-8")
