"""Channel policies by name."""

from collections.abc import Callable
from functools import partial

from molink.errors import UsageError
from molink.link.policies.adaptive import AdaptivePolicy
from molink.link.policies.base import ChannelPolicy
from molink.link.policies.baselines import ConcurrentPolicy, FifoPolicy
from molink.link.policies.molink import MoLinkPolicy

_POLICIES: dict[str, Callable[[], ChannelPolicy]] = {
    "concurrent": ConcurrentPolicy,
    "fifo": FifoPolicy,
    "molink": MoLinkPolicy,
    "adaptive": AdaptivePolicy,
    "adaptive-unpredicted": partial(AdaptivePolicy, predict=False),
}
#: Valid names.
POLICIES = tuple(_POLICIES)


def create_policy(name: str) -> ChannelPolicy:
    """Create a policy.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in _POLICIES:
        raise UsageError(f"unknown link policy {name!r}: choose from {', '.join(_POLICIES)}")
    return _POLICIES[name]()
