"""How busy each pipeline is with what was sent there, in seconds of its slowest stage."""

from collections import deque
from dataclasses import dataclass, field

from molink.routing.base import Key, Name

#: Tokens of an answer where none has ended yet, and the weight of the latest one.
GUESSED_ANSWER = 128.0
SMOOTHING = 0.05


@dataclass(slots=True)
class Routed:
    """A request where it is served: what its prefill and its answer were expected to take."""

    name: Name
    at: float
    prefill_s: float
    answer_s: float
    #: The node by which it was placed, if it was; 0 is none.
    key_span: int = 0
    began: bool = False


@dataclass(slots=True)
class PipelineWork:
    """Of one pipeline: what is to be done of the ``live`` requests, and what it was sent lately."""

    live: int = 0
    live_s: float = 0.0
    prefill_s: float = 0.0
    answer_s: float = 0.0
    recent: deque[tuple[float, float, float]] = field(default_factory=deque)
    #: Those whose first token has not come, as they were sent; ``since`` then one is computed.
    waiting: dict[Key, Routed] = field(default_factory=dict)
    since: float = 0.0

    def left_s(self, now: float) -> float:
        """What is still to be done: the prompt that is computed now is so in part."""
        first = next(iter(self.waiting.values()), None)
        done_s = min(first.prefill_s, max(0.0, now - self.since)) if first is not None else 0.0
        return self.live_s - done_s

    def expire(self, since: float) -> None:
        """Forget what was sent before."""
        while self.recent and self.recent[0][0] < since:
            _, prefill_s, answer_s = self.recent.popleft()
            self.prefill_s -= prefill_s
            self.answer_s -= answer_s
        if not self.recent:
            self.prefill_s = self.answer_s = 0.0


class Loads:
    """Keeps the requests of all pipelines, and their history over ``window_s`` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._placed: dict[Key, Routed] = {}
        self._work: dict[Name, PipelineWork] = {}
        #: Mean tokens of the answers that have ended.
        self.answer_tokens = GUESSED_ANSWER

    def of(self, name: Name, now: float) -> PipelineWork:
        """The work of a pipeline."""
        work = self._work.setdefault(name, PipelineWork())
        work.expire(now - self._window_s)
        return work

    def place(self, key: Key, placed: Routed) -> None:
        """A request was sent."""
        self._placed[key] = placed
        work = self.of(placed.name, placed.at)
        if not work.waiting:
            work.since = placed.at
        work.waiting[key] = placed
        work.live += 1
        work.live_s += placed.prefill_s + placed.answer_s
        work.prefill_s += placed.prefill_s
        work.answer_s += placed.answer_s
        work.recent.append((placed.at, placed.prefill_s, placed.answer_s))

    def began(self, key: Key, now: float) -> Routed | None:
        """Its prefill is done, the next one's begins; ``None`` if that is known, or it isn't."""
        placed = self._placed.get(key)
        if placed is None or placed.began:
            return None
        placed.began = True
        work = self._work.get(placed.name)
        if work is not None:
            work.live_s -= placed.prefill_s
            work.waiting.pop(key, None)
            work.since = now
        return placed

    def over(self, key: Key, generated: int, now: float) -> None:
        """It takes nothing any more."""
        self.began(key, now)
        placed = self._placed.pop(key, None)
        if placed is None:
            return
        work = self._work.get(placed.name)
        if work is not None:
            work.live -= 1
            work.live_s = work.live_s - placed.answer_s if work.live else 0.0
        if generated > 0:
            self.answer_tokens += SMOOTHING * (generated - self.answer_tokens)

    def forget(self, name: Name) -> None:
        """A pipeline is gone, and what it served is no load of who comes by its name."""
        self._work.pop(name, None)
        for key in [key for key, placed in self._placed.items() if placed.name == name]:
            del self._placed[key]

    def __len__(self) -> int:
        return len(self._placed)
