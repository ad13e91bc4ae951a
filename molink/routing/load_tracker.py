"""How busy each pipeline is with what was sent there, in seconds of its slowest stage."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from molink.routing.base import PipelineName, RequestKey

#: Tokens of an answer where none has ended yet, and the weight of the latest one.
DEFAULT_ANSWER_TOKENS = 128.0
SMOOTHING = 0.05


@dataclass(slots=True)
class RoutedRequest:
    """A request where it is served: what its prefill and its answer were expected to take."""

    pipeline: PipelineName
    sent_at: float
    prefill_s: float
    answer_s: float
    #: The node by which it was placed, if it was; 0 is none.
    key_span: int = 0
    has_begun: bool = False


@dataclass(slots=True)
class PipelineWork:
    """Of one pipeline: what is to be done of the ``num_live`` requests, and what it was sent
    lately."""

    num_live: int = 0
    live_s: float = 0.0
    prefill_s: float = 0.0
    answer_s: float = 0.0
    recent: deque[tuple[float, float, float]] = field(default_factory=deque)
    #: Those whose first token has not come, as they were sent; ``since`` then one is computed.
    waiting: dict[RequestKey, RoutedRequest] = field(default_factory=dict)
    computing_since: float = 0.0

    def remaining_s(self, now: float) -> float:
        """What is still to be done: the prompt that is computed now is so in part."""
        first = next(iter(self.waiting.values()), None)
        done_s = (
            min(first.prefill_s, max(0.0, now - self.computing_since)) if first is not None else 0.0
        )
        return self.live_s - done_s

    def expire_before(self, since: float) -> None:
        """Forget what was sent before."""
        while self.recent and self.recent[0][0] < since:
            _, prefill_s, answer_s = self.recent.popleft()
            self.prefill_s -= prefill_s
            self.answer_s -= answer_s
        if not self.recent:
            self.prefill_s = self.answer_s = 0.0


class LoadTracker:
    """Keeps the requests of all pipelines, and their history over ``window_s`` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._routed: dict[RequestKey, RoutedRequest] = {}
        self._work: dict[PipelineName, PipelineWork] = {}
        #: Mean tokens of the answers that have ended.
        self.answer_tokens = DEFAULT_ANSWER_TOKENS

    def work_of(self, name: PipelineName, now: float) -> PipelineWork:
        """The work of a pipeline."""
        work = self._work.setdefault(name, PipelineWork())
        work.expire_before(now - self._window_s)
        return work

    def add_request(self, key: RequestKey, routed: RoutedRequest) -> None:
        """A request was sent."""
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
        """Its prefill is done, the next one's begins; ``None`` if that is known, or it isn't."""
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
        """It takes nothing any more."""
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
        """A pipeline is gone, and what it served is no load of who comes by its name."""
        self._work.pop(name, None)
        for key in [key for key, routed in self._routed.items() if routed.pipeline == name]:
            del self._routed[key]

    def __len__(self) -> int:
        return len(self._routed)


#: Beginnings that are watched, and requests that say something about one.
MAX_PREFIXES = 4096
MIN_WAITS = 4
#: A wait counts as longer from so many times the one before (Preble, §4.2).
MIN_GROWTH = 2.0


@dataclass(slots=True)
class _Wait:
    half: int
    total_s: float = 0.0
    count: int = 0
    #: The mean before, if enough have told of it.
    previous_s: float | None = None

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count >= MIN_WAITS else None


class PrefixWaits:
    """Mean waits in the present half of a window, and in the one before."""

    def __init__(self, half_s: float) -> None:
        self._half_s = half_s
        self._waits: OrderedDict[int, _Wait] = OrderedDict()

    def add_wait(self, digest: int, wait_s: float, now: float) -> None:
        """A request that begins so has waited."""
        wait = self._current_wait(digest, now)
        wait.total_s += wait_s
        wait.count += 1

    def has_doubled(self, digest: int, least_s: float, now: float) -> bool:
        """Whether they wait for more than twice as long as before, and than ``least_s``.

        Where nothing is known of before, nothing has doubled. It is told once for a half of a
        window.
        """
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
