"""The API's backend: sends requests to pipelines and streams tokens, across recoveries.

The API has its own event loop. Only the methods of ``Backend`` run on it; everything else runs on
the daemon's loop.
"""

import array
import asyncio
import contextlib
import itertools
import logging
import secrets
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from molink.errors import (
    MessageTooLarge,
    ModelNotFound,
    MolinkError,
    Overloaded,
    WireError,
)
from molink.routing.cache_report import unpack_report
from molink.routing.create import create_router
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.swarm.frontend.request_router import RequestRouter
from molink.swarm.frontend.stream import (
    EmitTokenAction,
    FailStreamAction,
    PipelineEpoch,
    RequestStream,
    SendPixelsAction,
    SendToSchedulerAction,
    StreamAction,
    StreamLimits,
    SubmitAction,
)
from molink.swarm.running_time import RunningTime
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.serving import (
    Cancel,
    Credit,
    OutputTokens,
    PixelsReceived,
    PooledOutput,
    PromptFragment,
    Rejected,
    RejectReason,
    Request,
)
from molinkd.api.backend import MetricValues, ServedModel
from molinkd.peer.frontend.loop_calls import call_on_loop
from molinkd.peer.frontend.scheduler_connections import SchedulerConnections

log = logging.getLogger(__name__)

Item = GeneratedToken | MolinkError


class TokenQueue:
    """A queue with one reader. A batch of tokens wakes the reader's loop once.

    Its length is bounded by the request's credit window.
    """

    def __init__(self) -> None:
        """Must be created on the reader's event loop."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._filled = asyncio.Event()

    def put(self, item: Item) -> None:
        """Add an item, from any thread."""
        with self._lock:
            first = not self._items
            self._items.append(item)
        if first:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed
                self._loop.call_soon_threadsafe(self._filled.set)

    async def get_all(self) -> list[Item]:
        """Wait for items and return all of them."""
        await self._filled.wait()
        with self._lock:
            items = list(self._items)
            self._items.clear()
            self._filled.clear()
        return items


#: Interval of detecting a suspension, in seconds.
POLL_INTERVAL_S = 0.25


class RunningClock:
    """Seconds that this daemon has run, for timers on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = RunningTime(loop.time())
        self._timer = loop.call_later(POLL_INTERVAL_S, self._check)

    def time(self) -> float:
        """Seconds on this clock."""
        return self._time.counted_time(self._loop.time())

    def call_at(
        self, when: float, callback: Callable[..., object], *arguments: Any
    ) -> asyncio.TimerHandle:
        """Schedule a call at ``when``.

        It is early if the daemon is suspended before, so the callback must check the time.
        """
        return self._loop.call_at(when + self._time.skipped_s, callback, *arguments)

    def close(self) -> None:
        """Stop."""
        self._timer.cancel()

    def _check(self) -> None:
        self.time()
        self._timer = self._loop.call_later(POLL_INTERVAL_S, self._check)


#: Prompt ids per message, 4 bytes each: a payload has at most 256 KiB.
MAX_FRAGMENT_IDS = 32768
#: Status timeout in seconds, above the 3 s that the daemon waits for the coordinator.
_STATUS_S = 5.0


@dataclass(slots=True)
class _ActiveRequest:
    stream: RequestStream
    queue: TokenQueue
    target: PipelineEpoch | None = None
    #: Number of other pipelines that were available.
    num_alternatives: int = 0
    #: Tokens received from ``target``.
    num_tokens: int = 0
    timer: asyncio.TimerHandle | None = None


class SwarmBackend:
    """All requests of this peer's API. Implements :class:`molinkd.api.backend.Backend`."""

    def __init__(
        self,
        schedulers: SchedulerConnections,
        limits: StreamLimits,
        metrics: Callable[[], MetricValues],
        clock: RunningClock,
        status: Callable[[], Awaitable[bytes]],
        router: str = "e2",
    ) -> None:
        """``clock`` and ``status()`` (JSON, UTF-8) belong to the running event loop.

        ``router`` chooses among the pipelines of a model (:mod:`molink.routing.create`).
        """
        self._schedulers = schedulers
        self._clock = clock
        self._limits = limits
        self._collect_metrics = metrics
        self._query_status = status
        self._routing = RequestRouter(create_router(router))
        self._loop = asyncio.get_running_loop()
        self._active: dict[str, _ActiveRequest] = {}
        #: Keeps keys distinct from those of earlier runs of the daemon.
        self._prefix = secrets.token_hex(4)
        self._sequence = itertools.count()
        # Replaced, never mutated: the API thread reads them.
        self._models: tuple[ServedModel, ...] = ()
        self._ready: frozenset[str] = frozenset()
        self._counters: Counter[str] = Counter()
        #: Models without a usable pipeline: since when, and the last forming progress.
        self._unserved: dict[str, tuple[float, int]] = {}
        #: Requests that wait for their replay after a recovery, and the callback after the last.
        self._replaying: set[str] = set()
        self._on_replayed: Callable[[], None] | None = None

    # --- Backend: called on the API's loop ---

    def list_models(self) -> Sequence[ServedModel]:
        """Models whose tokenizer is on this PC."""
        return self._models

    def is_ready(self, model: str | None = None) -> bool:
        """Whether a pipeline accepts requests now."""
        ready = [served for served in self._models if served.name in self._ready]
        if model is None:
            return bool(ready)
        return any(model in (served.name, *served.adapters) for served in ready)

    async def generate(self, request: Request) -> AsyncGenerator[GeneratedToken, None]:
        """Stream an answer; see :class:`molinkd.api.backend.Backend`."""
        if request.model not in {served.name for served in self._models}:
            raise ModelNotFound(f"no model {request.model!r}; see /v1/models")
        key = f"{self._prefix}-{next(self._sequence)}"
        queue = TokenQueue()
        self._call_on_loop(self._open_request, key, request, queue)
        try:
            while True:
                items = await queue.get_all()
                for item in items:
                    if isinstance(item, MolinkError):
                        raise item
                    yield item
                    if item.finish_reason is not None:
                        return
                self._call_on_loop(self._on_consumed, key, len(items))
        finally:
            self._call_on_loop(self._close_request, key)

    def collect_metrics(self) -> MetricValues:
        """Metrics of this daemon and its workers."""
        figures = self._collect_metrics()
        for name, count in dict(self._counters).items():
            figures.counters[f"daemon_requests_{name}"] = float(count)
        for name, count in self._routing.counts.items():
            figures.counters[f"daemon_routes_{name}"] = float(count)
        figures.gauges["daemon_requests_active"] = float(len(self._active))
        return figures

    @property
    def num_started(self) -> int:
        """Requests received so far."""
        return self._counters["started"]

    async def fetch_status(self) -> bytes:
        """The swarm's status; see :class:`molinkd.api.backend.Backend`."""
        late = "the daemon is too busy to report the status"
        return await call_on_loop(self._loop, lambda: self._query_status(), _STATUS_S, late)

    def _call_on_loop(self, work: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the daemon's loop has been closed
            self._loop.call_soon_threadsafe(work, *args)

    # --- called by the daemon ---

    def set_models(self, models: Sequence[ServedModel]) -> None:
        """Set the offered models."""
        self._models = tuple(models)
        self._ready = frozenset(m.name for m in models if self._schedulers.ready_targets(m.name))

    def on_targets_changed(self, model: str) -> None:
        """Reroute requests after the usable schedulers of a model may have changed."""
        targets = self._schedulers.ready_targets(model)
        self._routing.retain_pipelines(
            PipelineEpoch(one.pipeline, one.epoch) for one in self._schedulers.routes
        )
        self._update_unserved(model, bool(targets))
        self._ready = self._ready | {model} if targets else self._ready - {model}
        for active in list(self._active.values()):
            if active.stream.request.model == model:
                self._choose_target(active, targets)

    def _update_unserved(self, model: str, served: bool) -> None:
        """Record since when a model has neither a pipeline nor forming progress."""
        sign = self._schedulers.forming_progress(model)
        if served or not any(route.model == model for route in self._schedulers.routes):
            self._unserved.pop(model, None)
        elif model not in self._unserved or sign not in (0, self._unserved[model][1]):
            self._unserved[model] = (self._clock.time(), sign)

    def call_when_replayed(self, model: str, call: Callable[[], None]) -> None:
        """Call ``call`` once every waiting request of ``model`` has a token or has finished."""
        self._on_replayed = call
        self._replaying = {
            key
            for key, active in self._active.items()
            if active.stream.request.model == model and active.stream.is_waiting
        }
        self._check_replayed()

    def _check_replayed(self) -> None:
        if self._on_replayed is None:
            return
        self._replaying = {
            key
            for key in self._replaying
            if key in self._active and self._active[key].stream.is_waiting
        }
        if not self._replaying:
            call, self._on_replayed = self._on_replayed, None
            call()

    def on_message(
        self, pipeline: str, message: DataMessage, payload: memoryview | None = None
    ) -> None:
        """Handle a scheduler's message."""
        now = self._clock.time()
        if isinstance(message, OutputTokens):
            self._on_cache_report(pipeline, message, payload, now)
            for token in message.tokens:
                active = self._find_active(pipeline, token.key)
                if active is not None:
                    if active.num_tokens == 0:
                        self._routing.on_first_token(active.stream.key, token.cached_tokens, now)
                    active.num_tokens += 1
                    self._carry_out(active, active.stream.on_token(token, now))
            self._check_replayed()
        elif isinstance(message, PixelsReceived):
            active = self._find_active(pipeline, message.key)
            if active is not None:
                self._carry_out(active, active.stream.on_pixels_received(message))
        elif isinstance(message, PooledOutput):
            active = self._find_active(pipeline, message.key)
            if active is not None and payload is not None and message.payload.dtype == "f32":
                active.stream.on_pooled(message, bytes(payload))
        elif isinstance(message, Rejected):
            active = self._find_active(pipeline, message.key)
            if active is not None:
                self._counters[f"rejected_{message.reason}"] += 1
                self._carry_out(active, active.stream.on_rejected(message, now))

    def _on_cache_report(
        self, pipeline: str, message: OutputTokens, payload: memoryview | None, now: float
    ) -> None:
        """Update the router's view of a prefix cache; malformed reports are ignored."""
        if message.cache is None or payload is None:
            return
        target = PipelineEpoch(pipeline, message.tokens[0].epoch)
        try:
            self._routing.on_cache_report(target, unpack_report(message.cache, payload), now)
        except WireError as error:
            log.debug("invalid cache report of the scheduler of %s: %s", pipeline, error)

    def _find_active(self, pipeline: str, key: str) -> _ActiveRequest | None:
        """The request of a submission's key, if ``pipeline`` serves it."""
        active = self._active.get(key.rpartition(".")[0])
        if active is None or active.target is None or active.target.pipeline != pipeline:
            return None
        return active

    def close(self) -> None:
        """Cancel all requests."""
        for key in list(self._active):
            self._close_request(key)

    # --- one request ---

    def _open_request(self, key: str, request: Request, queue: TokenQueue) -> None:
        since, _ = self._unserved.get(request.model, (None, 0))
        stream = RequestStream(key, request, self._limits, self._clock.time(), since)
        active = self._active[key] = _ActiveRequest(stream, queue)
        self._counters["started"] += 1
        self._choose_target(active, self._schedulers.ready_targets(request.model))

    def _on_consumed(self, key: str, count: int) -> None:
        active = self._active.get(key)
        if active is not None:
            self._carry_out(active, active.stream.on_tokens_consumed(count))

    def _close_request(self, key: str) -> None:
        active = self._active.pop(key, None)
        if active is None:
            return
        if active.stream.state != "done":
            self._counters["cancelled"] += 1
        self._carry_out(active, active.stream.cancel())
        self._routing.on_request_finished(key, active.num_tokens, self._clock.time())
        self._check_replayed()

    def _choose_target(self, active: _ActiveRequest, targets: Sequence[PipelineEpoch]) -> None:
        """Keep the request's pipeline if it is usable, else let the router choose one."""
        now = self._clock.time()
        if active.target not in targets:
            request = active.stream.request
            active.target = self._routing.choose_pipeline(active.stream.key, request, targets, now)
            active.num_tokens, active.num_alternatives = 0, max(0, len(targets) - 1)
        reason = "" if targets else self._schedulers.unready_reason(active.stream.request.model)
        if reason:
            active.stream.set_unserved_reason(reason)
        active.stream.on_formation_progress(
            self._schedulers.forming_progress(active.stream.request.model), now
        )
        self._carry_out(active, active.stream.set_target(active.target, now))

    def _on_timer(self, active: _ActiveRequest) -> None:
        self._carry_out(active, active.stream.wake(self._clock.time()))

    def _carry_out(self, active: _ActiveRequest, acts: list[StreamAction]) -> None:
        for act in acts:
            match act:
                case EmitTokenAction(token):
                    active.queue.put(token)
                case FailStreamAction(error):
                    self._counters["failed"] += 1
                    active.queue.put(error)
                case SendToSchedulerAction(target, message):
                    self._send_best_effort(target, message)
                case SubmitAction():
                    self._submit(active, act)
                case SendPixelsAction(target, fragment, data):
                    self._send_messages(target, fragment.key, [(fragment, data)])
        self._set_timer(active)

    def _set_timer(self, active: _ActiveRequest) -> None:
        if active.timer is not None:
            active.timer.cancel()
            active.timer = None
        when = active.stream.next_wake_at
        if when is not None:
            active.timer = self._clock.call_at(when, self._on_timer, active)

    def _submit(self, active: _ActiveRequest, act: SubmitAction) -> None:
        self._counters["submitted"] += 1
        cache = self._routing.cache_version_for(act.target, active.num_alternatives)
        submit = (
            act.submit
            if cache is None
            else msgspec.structs.replace(act.submit, cache_version=cache)
        )
        ids = split_prompt(submit.key, act.token_ids)
        self._send_messages(act.target, submit.key, [(submit, act.grammar), *ids])

    def _send_messages(
        self, target: PipelineEpoch, key: str, messages: Iterable[tuple[DataMessage, Buffer | None]]
    ) -> None:
        """Send messages of a submission; if one can't be sent, the submission is rejected."""
        try:
            for message, part in messages:
                self._schedulers.send(target, message, part)
        except MolinkError as error:
            # Cancel the part that may have been sent.
            self._send_best_effort(target, Cancel(key))
            refused = _rejection_of(target, key, error)
            self._loop.call_soon(self.on_message, target.pipeline, refused)

    def _send_best_effort(self, target: PipelineEpoch, message: Cancel | Credit) -> None:
        """Send a message that may be lost."""
        try:
            self._schedulers.send(target, message)
        except MolinkError as error:
            log.debug("can't send to the scheduler of %s: %s", target.pipeline, error)


def _rejection_of(target: PipelineEpoch, key: str, error: MolinkError) -> Rejected:
    """The rejection that stands for a submission that could not be sent."""
    reason: RejectReason = "epoch"  # the connection is lost: retry after a pause
    text, pause = str(error), 0.0
    if isinstance(error, MessageTooLarge):
        reason = "invalid"
        text = f"too many entries in `logit_bias` and `stop_token_ids`, or images: {error}"
    elif isinstance(error, Overloaded):
        reason, pause = "overloaded", 1.0
        text = "the connection to the pipeline is congested"
    return Rejected(target.epoch, key, reason, text, pause)


def split_prompt(key: str, ids: Sequence[int]) -> Iterator[tuple[PromptFragment, bytes]]:
    """Prompt ids (little-endian int32) in messages of at most :data:`MAX_FRAGMENT_IDS`."""
    for first in range(0, len(ids), MAX_FRAGMENT_IDS):
        part = array.array("i", ids[first : first + MAX_FRAGMENT_IDS])
        if sys.byteorder == "big":
            part.byteswap()
        yield PromptFragment(key, first, Payload("i32", (len(part),))), part.tobytes()
