"""Routers by name."""

from collections.abc import Callable

from molink.errors import UsageError
from molink.routing.base import Router
from molink.routing.e2 import E2
from molink.routing.least_loaded import LeastLoaded
from molink.routing.round_robin import RoundRobin

_ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "e2": E2,
}
#: Names that :func:`create_router` knows.
ROUTERS = tuple(_ROUTERS)


def create_router(name: str) -> Router:
    """A fresh router of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in _ROUTERS:
        raise UsageError(f"--router is one of {', '.join(ROUTERS)}, not {name!r}")
    return _ROUTERS[name]()
