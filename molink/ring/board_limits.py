"""Bounds of what other stages may have this one keep."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BoardLimits:
    """What an honest ring never exceeds, or a step would fail, or memory run out.

    ``requests`` counts those admitted and not forgotten, ``waiting_bytes`` the rows of volumes that
    have come, at least in part, and were not taken whole. ``context`` tokens and ``table`` blocks
    are those of one request; ``blocks`` of ``block_size`` tokens are in the KV pool.
    """

    requests: int = 1 << 16
    context: int = 1 << 24
    table: int = 1 << 24
    blocks: int = 1 << 31
    block_size: int = 1 << 16
    waiting_bytes: int = 256 << 20
