"""Transmission policies by name."""

from collections.abc import Callable
from functools import partial

from molink.errors import UsageError
from molink.link.policies.adaptive import Adaptive
from molink.link.policies.base import LanePolicy
from molink.link.policies.concurrent import Concurrent
from molink.link.policies.fifo import Fifo
from molink.link.policies.molink import MoLink

_POLICIES: dict[str, Callable[[], LanePolicy]] = {
    "concurrent": Concurrent,
    "fifo": Fifo,
    "molink": MoLink,
    "adaptive": Adaptive,
    "adaptive-unpredicted": partial(Adaptive, predict=False),
}
#: Names that :func:`create_policy` takes.
POLICIES = tuple(_POLICIES)


def create_policy(name: str) -> LanePolicy:
    """A fresh policy.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in _POLICIES:
        raise UsageError(f"no transmission policy {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
