"""Peers that a socket of this PC has banned for misbehaviour."""

import json
from typing import Any

#: Maximum entries of the list, which people read; the oldest are dropped first.
_MAX_ENTRIES = 32


class BannedPeers:
    """Banned peers with socket and reason, while they are members."""

    def __init__(self) -> None:
        #: (peer, socket) → reason.
        self._reasons: dict[tuple[str, str], str] = {}

    def record_ban(self, socket_name: str, peer: str, reason: str) -> None:
        """Record that a socket, by its display name, banned ``peer``."""
        self._reasons.pop((peer, socket_name), None)
        self._reasons[peer, socket_name] = reason[:200]
        if len(self._reasons) > _MAX_ENTRIES:
            del self._reasons[next(iter(self._reasons))]

    def drop_peer(self, peer: str) -> None:
        """Drop a peer that is no longer a member."""
        self._reasons = {key: reason for key, reason in self._reasons.items() if key[0] != peer}

    def add_to_status(self, status: bytes) -> bytes:
        """Add the banned peers to ``molink status --json`` (UTF-8)."""
        if not self._reasons:
            return status
        fields: dict[str, Any] = json.loads(status)
        names = {peer["id"]: peer["name"] for peer in fields["peers"]}
        fields["banned_peers"] = [
            {"peer": peer, "name": names.get(peer, peer), "banned_by": socket, "reason": reason}
            for (peer, socket), reason in self._reasons.items()
        ]
        return json.dumps(fields).encode("utf-8")
