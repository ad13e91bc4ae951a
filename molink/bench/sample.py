"""The measurement of one request."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Sample:
    """Times in seconds on the run's clock.

    ``piece_times`` are the ascending arrival times of the answer's pieces; ``finished_at`` is when
    the last piece or the finish reason arrived. ``output_tokens`` is the server's ``usage``, or the
    number of pieces without it. A failed request has an ``error`` and is excluded from statistics.
    """

    sent_at: float
    piece_times: tuple[float, ...] = ()
    finished_at: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_at(self) -> float:
        """Arrival time of the first piece; the end for an answer without text."""
        return self.piece_times[0] if self.piece_times else self.finished_at

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first_at - self.sent_at

    @property
    def latency(self) -> float:
        """Time to the end of the answer."""
        return self.finished_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; ``None`` below two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.finished_at - self.first_at) / (self.output_tokens - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between successive pieces.

        Several tokens in one piece count as one gap.
        """
        return tuple(b - a for a, b in pairwise(self.piece_times))
