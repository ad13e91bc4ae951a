"""What one request measured."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Sample:
    """Times in seconds on the run's clock.

    ``piece_times`` are the moments at which a piece of the answer arrived, rising; ``finished_at``
    is when the last piece, or the word that it was the last, did. ``output_tokens`` is the server's
    ``usage`` where it sends one, else the number of pieces. A failed request has an ``error``, and
    its figures count for nothing.
    """

    sent_at: float
    piece_times: tuple[float, ...] = ()
    finished_at: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_at(self) -> float:
        """When the first piece arrived; the end for an answer without text."""
        return self.piece_times[0] if self.piece_times else self.finished_at

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first_at - self.sent_at

    @property
    def latency(self) -> float:
        """Time to the end of the answer."""
        return self.finished_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; ``None`` for an answer of one token or none."""
        if self.output_tokens < 2:
            return None
        return (self.finished_at - self.first_at) / (self.output_tokens - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between successive pieces.

        A server that sends several tokens in one piece shows one gap for them.
        """
        return tuple(b - a for a, b in pairwise(self.piece_times))
