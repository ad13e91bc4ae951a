"""Scheduling policies by name."""

from collections.abc import Callable

from molink.errors import UsageError
from molink.scheduler.policies.base import SchedulingPolicy
from molink.scheduler.policies.cached_share import CachedShare
from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.policies.gittins import Gittins
from molink.scheduler.policies.mlfq import FixedPriority, Mlfq, SkipJoinMlfq
from molink.scheduler.policies.srpt import Srpt

_POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": Fcfs,
    "skip-join-mlfq": SkipJoinMlfq,
    "gittins": Gittins,
    "mlfq": Mlfq,
    "fixed-priority": FixedPriority,
    "cached-share": CachedShare,
}
#: Oracles, which need to know answer lengths and so are for simulations only.
_ORACLES: dict[str, Callable[[], SchedulingPolicy]] = {"srpt": Srpt}
#: Names of policies that can be used for serving.
SCHEDULING_POLICIES = tuple(_POLICIES)


def create_scheduling_policy(name: str) -> SchedulingPolicy:
    """Create a policy by name, including those for simulations.

    Raises:
        UsageError: there is no such policy.
    """
    known = _POLICIES | _ORACLES
    if name not in known:
        raise UsageError(f"no scheduling policy {name!r}: choose one of {', '.join(known)}")
    return known[name]()
