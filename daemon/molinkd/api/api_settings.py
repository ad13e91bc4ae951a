"""Settings of the endpoint."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from molink.errors import UsageError
from molink.text.tool_calls.formats import ToolCallParserChoice
from molinkd.api.cors import AllowedOrigins

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Settings of one endpoint. Times in seconds, sizes in bytes.

    ``host`` is the address to bind. Any address but loopback requires an API key: ``api_key``, or
    several in ``api_keys``, each with its name. ``allowed_hosts`` are additional names for the
    ``Host`` header, such as this PC's name or that of a reverse proxy; ``*`` allows all.
    ``cors_origins`` are other pages that may use the endpoint (see :class:`AllowedOrigins`).
    ``share_prefix_cache`` lets clients with different keys share cached prompts (see
    :mod:`molinkd.api.cache_salts`). ``max_choices`` limits prompts × ``n`` of one request.
    ``owner_token`` is the secret of this PC's owner, empty if nobody may change the swarm here.

    Raises:
        UsageError: the settings are invalid or would expose the endpoint without a key.
    """

    host: str = "127.0.0.1"
    api_key: str | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict)
    owner_token: str = field(default="", repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    share_prefix_cache: bool = False
    max_body_bytes: int = 2 * MIB
    #: The same while a served model takes images, and what such bodies and the pixels of images may
    #: take together.
    max_image_body_bytes: int = 32 * MIB
    max_image_bytes: int = 1024 * MIB
    max_connections: int = 512
    #: Maximum number of bodies received at once.
    max_concurrent_bodies: int = 64
    max_choices: int = 64
    #: How answers encode tool calls and reasoning: detected per model, or one format for all.
    tool_call_parser: ToolCallParserChoice = "auto"
    header_timeout_s: float = 10.0
    #: Slack of a body over ``min_body_rate`` bytes per second.
    body_timeout_s: float = 10.0
    min_body_rate: int = 16 * 1024
    keepalive_s: float = 75.0
    #: Maximum time without reading before a client loses its answer.
    stall_timeout_s: float = 60.0
    #: Idle time after which a stream sends a keepalive event.
    keepalive_interval_s: float = 10.0
    #: How long running answers may continue at shutdown, and how long connections may take to
    #: close.
    shutdown_grace_period_s: float = 0.0
    close_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        for name, key in self.keys:
            if not key.strip():
                raise UsageError(f"the API key {name!r} is empty: set a key, or remove it")
        if AllowedOrigins(self.cors_origins).allows_any and not self.keys:
            raise UsageError(
                "`cors_origins`: * lets any page that this PC opens use the endpoint; set "
                "an API key too, or name the origins"
            )
        if not self.loopback and not self.keys:
            raise UsageError(
                f"the endpoint would listen on {self.host}, where others can reach it, "
                "without an API key: set one with --api-key (or MOLINK_API_KEY), or listen "
                "on 127.0.0.1"
            )
        bounds = (
            self.max_body_bytes,
            self.max_image_body_bytes,
            self.max_image_bytes,
            self.max_connections,
            self.max_concurrent_bodies,
            self.max_choices,
            self.min_body_rate,
        )
        times = (
            self.header_timeout_s,
            self.body_timeout_s,
            self.keepalive_s,
            self.keepalive_interval_s,
            self.stall_timeout_s,
        )
        if min(*bounds, *times) <= 0:
            raise UsageError("all limits and timeouts of the endpoint must be positive")

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        """All keys as (name, key); the name of ``api_key`` is empty."""
        single = () if self.api_key is None else (("", self.api_key),)
        return (*single, *self.api_keys.items())

    @property
    def loopback(self) -> bool:
        """Whether only this PC can reach the endpoint."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name, or an IP address without brackets) is this PC."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
