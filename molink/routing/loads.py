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
    """Of one pipeline: what is to be done, and what it was sent in the window."""

    live_s: float = 0.0
    prefill_s: float = 0.0
    answer_s: float = 0.0
    recent: deque[tuple[float, float, float]] = field(default_factory=deque)

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
        work.live_s += placed.prefill_s + placed.answer_s
        work.prefill_s += placed.prefill_s
        work.answer_s += placed.answer_s
        work.recent.append((placed.at, placed.prefill_s, placed.answer_s))

    def began(self, key: Key) -> Routed | None:
        """Its prefill is done; ``None`` if that is known, or it isn't."""
        placed = self._placed.get(key)
        if placed is None or placed.began:
            return None
        placed.began = True
        work = self._work.get(placed.name)
        if work is not None:
            work.live_s -= placed.prefill_s
        return placed

    def over(self, key: Key, generated: int) -> None:
        """It takes nothing any more."""
        self.began(key)
        placed = self._placed.pop(key, None)
        if placed is None:
            return
        work = self._work.get(placed.name)
        if work is not None:
            work.live_s -= placed.answer_s
        if generated > 0:
            self.answer_tokens += SMOOTHING * (generated - self.answer_tokens)

    def forget(self, name: Name) -> None:
        """A pipeline is gone."""
        self._work.pop(name, None)

    def __len__(self) -> int:
        return len(self._placed)
