"""Tracks the load of each pipeline, in seconds of its slowest stage, and waits by prefix."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from molink.routing.base import PipelineName, RequestKey

#: Initial mean answer length, in tokens, and the weight of the latest answer.
DEFAULT_ANSWER_TOKENS = 128.0
SMOOTHING = 0.05


@dataclass(slots=True)
class RoutedRequest:
    """A request at its pipeline, with the expected seconds of its prefill and answer."""

    pipeline: PipelineName
    sent_at: float
    prefill_s: float
    answer_s: float
    #: The span by which the request was routed; 0 if none.
    key_span: int = 0
    has_begun: bool = False


@dataclass(slots=True)
class PipelineWork:
    """A pipeline's outstanding work, and the requests recently sent to it."""

    num_live: int = 0
    live_s: float = 0.0
    prefill_s: float = 0.0
    answer_s: float = 0.0
    recent: deque[tuple[float, float, float]] = field(default_factory=deque)
    #: Requests without a first token, in order; the first is computed since ``computing_since``.
    waiting: dict[RequestKey, RoutedRequest] = field(default_factory=dict)
    computing_since: float = 0.0

    def remaining_s(self, now: float) -> float:
        """Seconds of outstanding work, less the prefill in progress."""
        first = next(iter(self.waiting.values()), None)
        done_s = (
            min(first.prefill_s, max(0.0, now - self.computing_since)) if first is not None else 0.0
        )
        return self.live_s - done_s

    def expire_before(self, since: float) -> None:
        """Drop requests sent before ``since`` (monotonic seconds)."""
        while self.recent and self.recent[0][0] < since:
            _, prefill_s, answer_s = self.recent.popleft()
            self.prefill_s -= prefill_s
            self.answer_s -= answer_s
        if not self.recent:
            self.prefill_s = self.answer_s = 0.0


class LoadTracker:
    """Tracks the requests of all pipelines over ``window_s`` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._routed: dict[RequestKey, RoutedRequest] = {}
        self._work: dict[PipelineName, PipelineWork] = {}
        #: Mean tokens of finished answers.
        self.answer_tokens = DEFAULT_ANSWER_TOKENS

    def work_of(self, name: PipelineName, now: float) -> PipelineWork:
        work = self._work.setdefault(name, PipelineWork())
        work.expire_before(now - self._window_s)
        return work

    def add_request(self, key: RequestKey, routed: RoutedRequest) -> None:
        """Record a routed request."""
        self._routed[key] = routed
        work = self.work_of(routed.pipeline, routed.sent_at)
        if not work.waiting:
            work.computing_since = routed.sent_at
        work.waiting[key] = routed
        work.num_live += 1
        work.live_s += routed.prefill_s + routed.answer_s
        work.prefill_s += routed.prefill_s
        work.answer_s += routed.answer_s
        work.recent.append((routed.sent_at, routed.prefill_s, routed.answer_s))

    def on_first_token(self, key: RequestKey, now: float) -> RoutedRequest | None:
        """Record a prefill's end; ``None`` if already recorded or the request is unknown."""
        routed = self._routed.get(key)
        if routed is None or routed.has_begun:
            return None
        routed.has_begun = True
        work = self._work.get(routed.pipeline)
        if work is not None:
            work.live_s -= routed.prefill_s
            work.waiting.pop(key, None)
            work.computing_since = now
        return routed

    def on_request_end(self, key: RequestKey, generated: int, now: float) -> None:
        """Record the end of a request."""
        self.on_first_token(key, now)
        routed = self._routed.pop(key, None)
        if routed is None:
            return
        work = self._work.get(routed.pipeline)
        if work is not None:
            work.num_live -= 1
            work.live_s = work.live_s - routed.answer_s if work.num_live else 0.0
        if generated > 0:
            self.answer_tokens += SMOOTHING * (generated - self.answer_tokens)

    def drop_pipeline(self, name: PipelineName) -> None:
        """Drop a pipeline and its requests."""
        self._work.pop(name, None)
        for key in [key for key, routed in self._routed.items() if routed.pipeline == name]:
            del self._routed[key]

    def __len__(self) -> int:
        return len(self._routed)


#: Maximum prefixes tracked, and minimum waits for a mean.
MAX_PREFIXES = 4096
MIN_WAITS = 4
#: Growth of the mean wait that counts as an increase (Preble, §4.2).
MIN_GROWTH = 2.0


@dataclass(slots=True)
class _Wait:
    half: int
    total_s: float = 0.0
    count: int = 0
    #: The previous mean, if there were enough waits.
    previous_s: float | None = None

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count >= MIN_WAITS else None


class PrefixWaits:
    """Mean waits by prefix, in the current half window and the previous one."""

    def __init__(self, half_s: float) -> None:
        self._half_s = half_s
        self._waits: OrderedDict[int, _Wait] = OrderedDict()

    def add_wait(self, digest: int, wait_s: float, now: float) -> None:
        """Record the wait of a request."""
        wait = self._current_wait(digest, now)
        wait.total_s += wait_s
        wait.count += 1

    def has_doubled(self, digest: int, least_s: float, now: float) -> bool:
        """Whether the mean wait has doubled and exceeds ``least_s``; at most once per half
        window."""
        if digest not in self._waits:
            return False
        wait = self._current_wait(digest, now)
        mean = wait.mean_s
        if (
            mean is None
            or wait.previous_s is None
            or mean <= max(least_s, MIN_GROWTH * wait.previous_s)
        ):
            return False
        wait.previous_s = mean
        return True

    def _current_wait(self, digest: int, now: float) -> _Wait:
        half = int(now / self._half_s)
        wait = self._waits.get(digest)
        if wait is None:
            wait = self._waits[digest] = _Wait(half)
            while len(self._waits) > MAX_PREFIXES:
                self._waits.popitem(last=False)
        elif wait.half != half:
            wait.previous_s = wait.mean_s if wait.half == half - 1 else None
            wait.half, wait.total_s, wait.count = half, 0.0, 0
        self._waits.move_to_end(digest)
        return wait
