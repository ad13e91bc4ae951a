"""Which molink understands which."""

#: What daemons, coordinators and workers say to each other, and what they take it to mean. It rises
#: with each change after which an older molink would misread a newer one, or the other way round;
#: a field that may be left out is none. PCs of one number may be in one ring, whatever their
#: versions. Of the messages that are read across numbers (``JoinRequest``, ``Commitment`` and
#: ``PairingResult``, ``PeerReport``, ``LeaderHeartbeat``, those of ``leading``) the fields never
#: change.
PROTOCOL = 7


def is_later(identity: bytes, than: bytes) -> bool:
    """Whether a connection was made after another one of the same socket. Numbers wrap around."""
    difference = int.from_bytes(identity[1:], "big") - int.from_bytes(than[1:], "big")
    return 0 < difference % (1 << 32) < 1 << 31
