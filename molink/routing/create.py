"""Routers by name."""

from collections.abc import Callable

from molink.errors import UsageError
from molink.routing.base import Router
from molink.routing.e2 import E2Router
from molink.routing.simple_routers import LeastLoadedRouter, RoundRobinRouter

_ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobinRouter,
    "least-loaded": LeastLoadedRouter,
    "e2": E2Router,
}
ROUTERS = tuple(_ROUTERS)


def create_router(name: str) -> Router:
    """Create a router by name.

    Raises:
        UsageError: there is no such router.
    """
    if name not in _ROUTERS:
        raise UsageError(f"--router must be one of {', '.join(ROUTERS)}, not {name!r}")
    return _ROUTERS[name]()
