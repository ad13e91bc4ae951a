"""The protocol version, and the order of a socket's connections."""

#: Version of the protocol between daemons, coordinators and workers. Increment it with each change
#: that makes an older molink misread a newer one or vice versa; optional fields don't count. PCs
#: with the same number may share a ring, regardless of their molink versions. Messages that are
#: read across numbers must never change their fields: ``JoinRequest``, ``Commitment``,
#: ``PairingResult``, ``PeerReport``, ``LeaderHeartbeat``, and those of ``election``.
PROTOCOL = 12


def is_later(identity: bytes, than: bytes) -> bool:
    """Whether one ROUTER connection is newer than another of the same socket. Ids wrap around."""
    difference = int.from_bytes(identity[1:], "big") - int.from_bytes(than[1:], "big")
    return 0 < difference % (1 << 32) < 1 << 31
