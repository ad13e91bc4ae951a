"""What the tail samples from a volume, piece by piece, until it can be reported."""

from molink.ring.segment import SegmentResult
from molink.wire.messages.data import Choice, Sampled, TopLogprobs


class Collector:
    """One :class:`Sampled` per volume, with the last piece; the head waits for that."""

    def __init__(self) -> None:
        self._choices: dict[int, list[Choice]] = {}
        #: In order and without doubles: a request that has failed does so in every later piece.
        self._failed: dict[int, dict[int, None]] = {}

    def add(
        self, sampled: Sampled, result: SegmentResult, *, last: bool
    ) -> list[TopLogprobs | Sampled]:
        """A piece's ``result`` came with ``sampled``: what goes to the head now."""
        tick = sampled.tick
        choices = self._choices.setdefault(tick, [])
        failed = self._failed.setdefault(tick, {})
        choices += sampled.choices
        failed.update(dict.fromkeys(sampled.failed))
        if not last:
            return [*result.tops]
        del self._choices[tick], self._failed[tick]
        return [*result.tops, Sampled(tick, tuple(choices), tuple(failed))]

    def __len__(self) -> int:
        """Volumes of which more pieces are to come."""
        return len(self._choices)
