"""The chat endpoint as a part of the daemon: it runs in a thread of its own."""

import asyncio
import sys

from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import Backend
from molinkd.api.http_server import EndpointServer
from molinkd.api.prompt_worker_pool import PromptWorkers
from molinkd.peer.settings import Settings
from molinkd.platform import child_options

#: Windows waits only some seconds for a program whose console or session ends.
MAX_GRACE_PERIOD_S = 3.0 if sys.platform == "win32" else 20.0


def api_settings(settings: Settings) -> ApiSettings:
    """Those of the endpoint.

    Raises:
        UsageError: they would let strangers in, or can't work.
    """
    return ApiSettings(
        host=settings.api_host,
        api_key=settings.api_key,
        api_keys=settings.api_keys,
        allowed_hosts=settings.allowed_hosts,
        cors_origins=settings.cors_origins,
        max_body_bytes=settings.max_body,
        shutdown_grace_period_s=min(settings.shutdown_grace_period, MAX_GRACE_PERIOD_S),
        tool_call_parser=settings.tool_call_parser,
    )


class ApiEndpoint:
    """Starts and stops the endpoint without holding up the daemon's event loop."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        """Raises :class:`UsageError` if the settings would let strangers in."""
        api = api_settings(settings)
        self._ports = settings.ports_to_try("api_port")
        self._server = EndpointServer(backend, api, PromptWorkers(child_options()))

    async def start(self) -> None:
        """Listen on the port of the settings, or the next free one if nobody has chosen it.

        Raises:
            PortInUse: it is taken, or all are.
            UsageError: the address is none of this PC's.
        """
        await asyncio.to_thread(self._server.start, *self._ports)

    async def close(self) -> None:
        """Stop, once running answers have ended or had their time. May be called twice."""
        await asyncio.to_thread(self._server.stop)

    @property
    def url(self) -> str:
        """The endpoint's root, as seen from this PC: ``http://127.0.0.1:5465``."""
        return self._server.url.removesuffix("/v1")
