"""Connections to the heads of all pipelines, and which of them can take requests now."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq.asyncio

from molink.errors import Unavailable
from molink.facts.identity import peer_id
from molink.swarm.frontend.stream import HeadEpoch
from molink.wire.messages.codec import Buffer, DataMessage, data_codec
from molink.wire.messages.instructions import Route, StageAddress
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.endpoints import endpoints

log = logging.getLogger(__name__)

#: Routes that a report shows at most.
MAX_SHOWN = 16


@dataclass(slots=True)
class _HeadClient:
    route: Route
    client: Client[DataMessage] | None = None

    @property
    def target(self) -> HeadEpoch | None:
        """Where to submit; ``None`` while the pipeline or its head can't be reached."""
        if self.client is None or not self.client.connected or not self.route.ready:
            return None
        return HeadEpoch(self.route.pipeline, self.route.epoch)


class Heads:
    """One connection per pipeline, to the worker of its stage 0.

    ``on_change`` is told of a model whose usable heads may have changed; ``on_message`` gets what a
    pipeline's head sends.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        on_change: Callable[[str], None],
        on_message: Callable[[str, DataMessage, memoryview | None], None],
        via: Callable[[StageAddress], StageAddress] = lambda address: address,
    ) -> None:
        """``via`` says where a head is reached from here."""
        self._context = context
        self._keys = keys
        self._codec = data_codec()
        self._on_change = on_change
        self._on_message = on_message
        self._via = via
        self._heads: dict[str, _HeadClient] = {}
        #: Pipelines that the coordinator hasn't named since it welcomed us last.
        self._unconfirmed: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def welcomed(self) -> None:
        """A session begins: what is known is of another one, or of another coordinator."""
        self._unconfirmed = set(self._heads)

    def update(self, route: Route) -> list[str]:
        """Take in where a pipeline's requests go; an older epoch than known is ignored.

        Unless it is the first word on that pipeline of a session: then that is what holds.

        Returns:
            Pipelines that are found to have ended while there was no session: a coordinator names
            one of their model that is ready, and not them.
        """
        head = self._heads.get(route.pipeline)
        known = route.pipeline not in self._unconfirmed
        if head is not None and known and route.epoch < head.route.epoch:
            return []
        self._unconfirmed.discard(route.pipeline)
        ended = [
            pipeline
            for pipeline in sorted(self._unconfirmed)
            if route.ready
            and self._heads[pipeline].route.model == route.model
            and pipeline not in route.beside
        ]
        for pipeline in ended:
            self.remove(pipeline)
        if head is None:
            head = self._heads[route.pipeline] = _HeadClient(route)
        elif head.route.head != route.head or route.head is None:
            self._disconnect(head)
        head.route = route
        if head.client is None:
            self._connect(head)
        self._on_change(route.model)
        return ended

    def moved(self, peer: str) -> None:
        """There is another way to a member than before."""
        for head in self._heads.values():
            if head.route.head is not None and head.route.head.peer == peer:
                self._disconnect(head)
                self._connect(head)

    def remove(self, pipeline: str) -> None:
        """A pipeline is no more."""
        self._unconfirmed.discard(pipeline)
        head = self._heads.pop(pipeline, None)
        if head is not None:
            self._disconnect(head)
            self._on_change(head.route.model)

    def targets(self, model: str) -> list[HeadEpoch]:
        """Pipelines that can take requests for ``model`` now."""
        return [
            target
            for head in self._heads.values()
            if head.route.model == model and (target := head.target) is not None
        ]

    def reason(self, model: str) -> str:
        """Why the coordinator has no ready pipeline for ``model``; empty if it hasn't said."""
        routes = [head.route for head in self._heads.values() if head.route.model == model]
        return next((route.reason for route in routes if route.reason), "")

    def forming(self, model: str) -> int:
        """Another number than before while a pipeline for ``model`` gets on with being formed."""
        return sum(head.route.forming for head in self._heads.values() if head.route.model == model)

    @property
    def routes(self) -> tuple[Route, ...]:
        """All pipelines that are known."""
        return tuple(head.route for head in self._heads.values())

    @property
    def known(self) -> tuple[tuple[str, int, bool], ...]:
        """The newest routes as reports show them."""
        routes = [*self.routes][-MAX_SHOWN:]
        return tuple((route.pipeline, route.epoch, route.ready) for route in routes)

    def send(self, target: HeadEpoch, message: DataMessage, payload: Buffer | None = None) -> None:
        """Send to the head of ``target``.

        Raises:
            Unavailable: it can't be reached.
            Overloaded: it takes no more at the moment.
            MessageTooLarge: the message is too long for its header.
        """
        head = self._heads.get(target.pipeline)
        if head is None or head.client is None or head.route.epoch != target.epoch:
            raise Unavailable(f"the head of {target.pipeline} in epoch {target.epoch} is gone")
        head.client.send(message, payload)

    async def close(self) -> None:
        """End all connections."""
        for head in self._heads.values():
            self._disconnect(head)
        self._heads.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _connect(self, head: _HeadClient) -> None:
        address = head.route.head
        if address is None or not address.addresses:
            return
        if address.peer != peer_id(address.public_key):
            log.warning("the route of %s names a peer by another's id", head.route.pipeline)
            return
        pipeline = head.route.pipeline
        address = self._via(address)

        def changed() -> None:
            self._on_change(head.route.model)

        head.client = Client(
            self._context,
            self._keys,
            self._codec,
            address.public_key,
            endpoints(address.addresses, address.port),
            name=f"the head of {pipeline}",
            events=ClientEvents(
                on_message=lambda message, payload: self._on_message(pipeline, message, payload),
                on_connect=changed,
                on_disconnect=changed,
            ),
        )
        head.client.start()

    def _disconnect(self, head: _HeadClient) -> None:
        if head.client is not None:
            task = asyncio.get_running_loop().create_task(head.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            head.client = None
