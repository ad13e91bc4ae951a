"""Connection of a node."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    """One PC and its connection to the internet.

    Rates are Mbit/s of IP packets, 0 = unlimited; ``delay_ms`` is one way, for sent packets;
    ``queue_bytes`` bounds each of two drop-tail queues; ``loss`` is the share of sent packets lost.
    A ``closed`` (1) node can connect to others but accepts nothing, as behind a router.
    """

    name: str
    up_mbps: float = 0.0
    down_mbps: float = 0.0
    delay_ms: float = 0.0
    queue_bytes: int = 256 * 1024
    loss: float = 0.0
    closed: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self)[1:]:
            check_field(each.name, getattr(self, each.name))


#: Fields that may change while the rig runs.
CHANGEABLE = tuple(each.name for each in fields(Node)[1:])


def check_field(name: str, value: Any) -> None:
    """Validate a field, or raise :class:`ValueError`."""
    if name not in CHANGEABLE:
        raise ValueError(f"a node has no {name!r}: choose one of {', '.join(CHANGEABLE)}")
    top = 1.0 if name in ("loss", "closed") else float("inf")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= top:
        raise ValueError(f"{name}={value!r} is no number from 0 to {top:g}")
