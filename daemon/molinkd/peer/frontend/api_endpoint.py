"""The API endpoint of the daemon, in its own thread."""

import asyncio
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from molinkd.api.administration import Administration
from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import Backend
from molinkd.api.http_server import EndpointServer
from molinkd.peer.settings import Settings
from molinkd.platform import child_options

if TYPE_CHECKING:
    from molinkd.api.prompt_worker_pool import PromptWorkers

#: Maximum grace period in seconds: Windows kills a program soon after its console closes.
MAX_GRACE_PERIOD_S = 3.0 if sys.platform == "win32" else 20.0


def api_settings(settings: Settings) -> ApiSettings:
    """The API's part of the settings.

    Raises:
        UsageError: They are insecure or inconsistent.
    """
    return ApiSettings(
        host=settings.api_host,
        api_key=settings.api_key,
        api_keys=settings.api_keys,
        allowed_hosts=settings.allowed_hosts,
        cors_origins=settings.cors_origins,
        share_prefix_cache=settings.share_prefix_cache,
        max_body_bytes=settings.max_body,
        shutdown_grace_period_s=min(settings.shutdown_grace_period, MAX_GRACE_PERIOD_S),
        tool_call_parser=settings.tool_call_parser,
    )


class ApiEndpoint:
    """Starts and stops the API without blocking the daemon's event loop."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        make_administration: Callable[[], Administration],
    ) -> None:
        """``make_administration()`` is called with the first connection, in the API's thread.

        Raises:
            UsageError: The settings are insecure.
        """
        #: What only this PC's owner knows, until the next start.
        self.owner_token = secrets.token_urlsafe(32)
        api = replace(api_settings(settings), owner_token=self.owner_token)
        #: The first of its API keys; empty if it needs none.
        self.api_key = next((key for _, key in api.keys), "")
        self._ports = settings.ports_to_try("api_port")
        self._server = EndpointServer(backend, api, _create_prompt_workers, make_administration)

    async def start(self) -> None:
        """Listen on the configured port, or on the next free one if it is the default.

        Raises:
            PortInUse: No port is free.
            UsageError: The address does not belong to this PC.
        """
        await asyncio.to_thread(self._server.start, *self._ports)

    async def close(self) -> None:
        """Stop after the grace period of running answers. Idempotent."""
        await asyncio.to_thread(self._server.stop)

    @property
    def url(self) -> str:
        """Root URL from this PC: ``http://127.0.0.1:5465``."""
        return self._server.url.removesuffix("/v1")


def _create_prompt_workers() -> "PromptWorkers":
    from molinkd.api.prompt_worker_pool import PromptWorkers

    return PromptWorkers(child_options())
