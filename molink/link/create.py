"""Transmission policies by name."""

from collections.abc import Callable

from molink.errors import UsageError
from molink.link.fifo import Fifo
from molink.link.policy import Policy

_POLICIES: dict[str, Callable[[], Policy]] = {"fifo": Fifo}


def create_policy(name: str) -> Policy:
    """A fresh policy.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in _POLICIES:
        raise UsageError(f"no transmission policy {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
