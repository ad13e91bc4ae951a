"""ZeroMQ endpoints of hosts and ports."""

from collections.abc import Sequence


def endpoints(hosts: Sequence[str], port: int) -> tuple[str, ...]:
    """``tcp://`` endpoints for host names or addresses as peers announce them."""
    return tuple(
        f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts
    )
