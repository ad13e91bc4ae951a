"""The ids that a ROUTER socket gives to its connections, one after the other."""


def is_later(identity: bytes, than: bytes) -> bool:
    """Whether a connection was made after another one of the same socket. Numbers wrap around."""
    difference = int.from_bytes(identity[1:], "big") - int.from_bytes(than[1:], "big")
    return 0 < difference % (1 << 32) < 1 << 31
