"""How the endpoint is set up."""

import ipaddress
from dataclasses import dataclass

from molink.errors import UsageError

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Settings of one endpoint. Times in seconds, sizes in bytes.

    ``host`` is the address the endpoint binds; beyond loopback it needs an ``api_key``.
    ``allowed_hosts`` are further names under which clients may call it (the ``Host`` header), for
    instance the name of this PC or of a reverse proxy; ``*`` allows every name.
    ``max_choices`` bounds prompts × ``n`` of one request.

    Raises:
        UsageError: the settings would let strangers in, or can't work.
    """

    host: str = "127.0.0.1"
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 2 * MIB
    max_connections: int = 512
    #: Bodies that may be under way at once.
    max_bodies: int = 64
    max_choices: int = 64
    header_timeout_s: float = 10.0
    #: How late a body may be that comes at ``min_body_rate`` bytes per second.
    body_timeout_s: float = 10.0
    min_body_rate: int = 16 * 1024
    keepalive_s: float = 75.0
    #: A client that takes nothing for this long loses its answer.
    stall_timeout_s: float = 60.0
    #: How long running answers may go on when the endpoint stops.
    grace_s: float = 1.0

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty: set a real one, or none at all")
        if not self.loopback and self.api_key is None:
            raise UsageError(
                f"the endpoint would listen on {self.host}, where others can reach it, without an "
                "API key: set one with --api-key (or MOLINK_API_KEY), or listen on 127.0.0.1"
            )
        bounds = (
            self.max_body_bytes,
            self.max_connections,
            self.max_bodies,
            self.max_choices,
            self.min_body_rate,
        )
        times = (self.header_timeout_s, self.body_timeout_s, self.keepalive_s, self.stall_timeout_s)
        if min(*bounds, *times) <= 0:
            raise UsageError("every limit and timeout of the endpoint must be above 0")

    @property
    def loopback(self) -> bool:
        """Whether only this PC can reach the endpoint."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name, or an IP address without brackets) is this PC itself."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
