"""Connections to the schedulers of all pipelines."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq.asyncio

from molink.errors import Unavailable
from molink.facts.identity import derive_peer_id
from molink.swarm.frontend.stream import PipelineEpoch
from molink.wire.messages.codec import Buffer, DataMessage, data_codec
from molink.wire.messages.instructions import Route, StageAddress
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.key_pair import KeyPair

log = logging.getLogger(__name__)

#: Maximum number of routes in a peer report.
MAX_SUMMARIES = 16


@dataclass(slots=True)
class _SchedulerClient:
    route: Route
    client: Client[DataMessage] | None = None

    @property
    def target(self) -> PipelineEpoch | None:
        """Where to submit; ``None`` while the pipeline is not ready or not connected."""
        if self.client is None or not self.client.is_connected or not self.route.is_ready:
            return None
        return PipelineEpoch(self.route.pipeline, self.route.epoch)


class SchedulerConnections:
    """One connection per pipeline, to the worker of its first stage.

    ``on_change`` gets a model whose usable schedulers may have changed, ``on_message`` the messages
    of a pipeline's scheduler.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        on_change: Callable[[str], None],
        on_message: Callable[[str, DataMessage, memoryview | None], None],
        via: Callable[[StageAddress], StageAddress] = lambda address: address,
    ) -> None:
        """``via`` maps a scheduler's address to one that is reachable from this PC."""
        self._context = context
        self._keys = keys
        self._codec = data_codec()
        self._on_change = on_change
        self._on_message = on_message
        self._localize = via
        self._schedulers: dict[str, _SchedulerClient] = {}
        #: Pipelines without a route in the current session yet.
        self._unconfirmed: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def on_welcome(self) -> None:
        """Start a session; the known routes are from an earlier session."""
        self._unconfirmed = set(self._schedulers)

    def update_route(self, route: Route) -> list[str]:
        """Update a pipeline's route; an older epoch is ignored.

        The first route of a pipeline in a session always applies.

        Returns:
            Pipelines that ended before the session: a ready route of the same model does not list
                them.
        """
        scheduler = self._schedulers.get(route.pipeline)
        known = route.pipeline not in self._unconfirmed
        if scheduler is not None and known and route.epoch < scheduler.route.epoch:
            return []
        self._unconfirmed.discard(route.pipeline)
        ended = [
            pipeline
            for pipeline in sorted(self._unconfirmed)
            if route.is_ready
            and self._schedulers[pipeline].route.model == route.model
            and pipeline not in route.sibling_pipelines
        ]
        for pipeline in ended:
            self.remove_pipeline(pipeline)
        if scheduler is None:
            scheduler = self._schedulers[route.pipeline] = _SchedulerClient(route)
        elif scheduler.route.scheduler != route.scheduler or route.scheduler is None:
            self._close_client(scheduler)
        scheduler.route = route
        if scheduler.client is None:
            self._open_client(scheduler)
        self._on_change(route.model)
        return ended

    def reconnect_peer(self, peer: str) -> None:
        """Connect to the schedulers on ``peer``, whose route has changed.

        Connections that exist stay: a route that ends in good order leaves them open.
        """
        for scheduler in self._schedulers.values():
            address, client = scheduler.route.scheduler, scheduler.client
            is_connected = client is not None and client.is_connected
            if address is not None and address.peer == peer and not is_connected:
                self._close_client(scheduler)
                self._open_client(scheduler)

    def remove_pipeline(self, pipeline: str) -> None:
        """Drop a removed pipeline."""
        self._unconfirmed.discard(pipeline)
        scheduler = self._schedulers.pop(pipeline, None)
        if scheduler is not None:
            self._close_client(scheduler)
            self._on_change(scheduler.route.model)

    def ready_targets(self, model: str) -> list[PipelineEpoch]:
        """Pipelines that accept requests for ``model`` now."""
        return [
            target
            for scheduler in self._schedulers.values()
            if scheduler.route.model == model and (target := scheduler.target) is not None
        ]

    def unready_reason(self, model: str) -> str:
        """Why no pipeline of ``model`` is ready, by the coordinator; empty if unknown."""
        routes = [
            scheduler.route
            for scheduler in self._schedulers.values()
            if scheduler.route.model == model
        ]
        return next((route.reason for route in routes if route.reason), "")

    def forming_progress(self, model: str) -> int:
        """A number that changes while a pipeline of ``model`` makes progress in forming."""
        return sum(
            scheduler.route.forming_progress
            for scheduler in self._schedulers.values()
            if scheduler.route.model == model
        )

    @property
    def routes(self) -> tuple[Route, ...]:
        """Routes of all pipelines."""
        return tuple(scheduler.route for scheduler in self._schedulers.values())

    @property
    def route_summaries(self) -> tuple[tuple[str, int, bool], ...]:
        """The newest routes, for the peer report."""
        routes = [*self.routes][-MAX_SUMMARIES:]
        return tuple((route.pipeline, route.epoch, route.is_ready) for route in routes)

    def send(
        self, target: PipelineEpoch, message: DataMessage, payload: Buffer | None = None
    ) -> None:
        """Send to the scheduler of ``target``.

        Raises:
            Unavailable: It is not connected, or in another epoch.
            Overloaded: Its send queue is full.
            MessageTooLarge: The message is too large for its header.
        """
        scheduler = self._schedulers.get(target.pipeline)
        if scheduler is None or scheduler.client is None or scheduler.route.epoch != target.epoch:
            raise Unavailable(f"the scheduler of {target.pipeline} in epoch {target.epoch} is gone")
        scheduler.client.send(message, payload)

    async def close(self) -> None:
        """Close all connections."""
        for scheduler in self._schedulers.values():
            self._close_client(scheduler)
        self._schedulers.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _open_client(self, scheduler: _SchedulerClient) -> None:
        address = scheduler.route.scheduler
        if address is None or not address.addresses:
            return
        if address.peer != derive_peer_id(address.public_key):
            log.warning(
                "the route of %s has a mismatched peer id and key", scheduler.route.pipeline
            )
            return
        pipeline = scheduler.route.pipeline
        local = self._localize(address)

        def on_disconnect() -> None:
            if scheduler.client is client and self._localize(address) != local:
                # The route that it used has ended meanwhile.
                self._close_client(scheduler)
                self._open_client(scheduler)
            self._on_change(scheduler.route.model)

        client = scheduler.client = Client(
            self._context,
            self._keys,
            self._codec,
            local.public_key,
            endpoints(local.addresses, local.port),
            name=f"the scheduler of {pipeline}",
            events=ClientEvents(
                on_message=lambda message, payload: self._on_message(pipeline, message, payload),
                on_connect=lambda: self._on_change(scheduler.route.model),
                on_disconnect=on_disconnect,
            ),
        )
        client.start()

    def _close_client(self, scheduler: _SchedulerClient) -> None:
        if scheduler.client is not None:
            task = asyncio.get_running_loop().create_task(scheduler.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            scheduler.client = None
