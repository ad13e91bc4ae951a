"""Scheduling policies by name."""

from collections.abc import Callable

from molink.errors import UsageError
from molink.head.policies.base import SchedulingPolicy
from molink.head.policies.fcfs import Fcfs

_POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {"fcfs": Fcfs}
#: Names that :func:`create_scheduling_policy` takes.
SCHEDULING_POLICIES = tuple(_POLICIES)


def create_scheduling_policy(name: str) -> SchedulingPolicy:
    """A fresh policy.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in _POLICIES:
        names = ", ".join(_POLICIES)
        raise UsageError(f"no scheduling policy {name!r}: choose one of {names}")
    return _POLICIES[name]()
