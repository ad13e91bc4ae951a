"""Round-trip times of a ring by its stages' profiles and links, and costs of requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from molink.facts.profile import MAX_CHUNK_ROWS, Profile

#: Bytes per token of a micro-batch on the last link: the sampled id and its header.
TOKEN_BYTES = 64
#: Seconds that each hop takes in addition to the link and the step: event loops, threads,
#: encryption, scheduler. Measured (``docs/performance.md``).
HANDLING_S = 0.0015


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A link's measurements by its sender; ``None`` means unknown.

    ``latency`` is one-way, in seconds; ``rate`` is in bytes/s; ``loss`` is the share of lost
    packets.
    """

    latency: float | None = None
    rate: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class RingTimes:
    """Times of a ring; ``links[i]`` leads from stage ``i`` to the next, the last one to stage 0.

    ``row_bytes`` is the size of a row between stages. Unknown times count as 0.
    """

    profiles: Sequence[Profile]
    links: Sequence[LinkFacts]
    row_bytes: int
    #: Cache of :meth:`transfer_s`, which is needed after every decode step.
    _transfers: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    def compute_s(self, tokens: int, context: float = 0) -> float:
        """``T_o`` of the MoLink paper (§4): all stages' steps of ``tokens`` decode rows."""
        return sum([profile.decode_s(tokens, context) for profile in self.profiles])

    def transfer_s(self, tokens: int) -> float:
        """``T_m`` of the MoLink paper (§4): all links' latencies and transfers."""
        known = self._transfers.get(tokens)
        if known is None:
            known = sum(self.link_s(index, tokens) for index in range(len(self.links)))
            self._transfers[tokens] = known
        return known

    def link_s(self, index: int, tokens: int) -> float:
        """Seconds of a decode volume of ``tokens`` rows over link ``index``."""
        return (self.links[index].latency or 0.0) + self.send_s(index, tokens)

    def send_s(self, index: int, tokens: int) -> float:
        """Seconds for which link ``index`` is busy with a decode volume of ``tokens`` rows."""
        rate = self.links[index].rate
        each = TOKEN_BYTES if index == len(self.links) - 1 else self.row_bytes
        return each * tokens / rate if rate else 0.0

    def round_trip_s(self, tokens: int, context: float = 0) -> float:
        """Seconds of a round trip without waiting: the minimum time per token."""
        return self.compute_s(tokens, context) + self.transfer_s(tokens)

    def prompt_s(self, rows: int, before: int = 0) -> float:
        """Seconds of ``rows`` rows of a prompt round the ring without waiting, after ``before``
        tokens.

        Chunks follow each other at the rate of the slowest stage or link, and the last one
        completes the round trip.
        """
        begin = before + rows / 2
        stages = [
            (
                _chunked_s(profile, rows) + begin * profile.prefill_token_s * rows,
                profile.decode_s(1),
            )
            for profile in self.profiles
        ]
        links = [(self.send_s(i, rows), self.send_s(i, 1)) for i in range(len(self.links))]
        slowest, first = max([*stages, *links], default=(0.0, 0.0))
        return max(0.0, self.round_trip_s(1) - first) + slowest


def _chunked_s(profile: Profile, rows: int) -> float:
    """Seconds of a stage for ``rows`` rows in the largest chunks."""
    whole, rest = divmod(rows, MAX_CHUNK_ROWS)
    return whole * profile.prefill_s(MAX_CHUNK_ROWS) + profile.prefill_s(rest)


#: Upper bound of a time per token; larger values are not measurements.
MAX_SECONDS = 1e6
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]

#: Prompt lengths for the regression of prefill costs.
_SHORT, _LONG = 1024, 8192
#: Numbers of streams for the marginal cost of a decode row.
_FEW, _MANY = 1, 32


class RequestCosts(msgspec.Struct, frozen=True, array_like=True):
    """Seconds for which a request occupies a pipeline's slowest stage.

    Each prefill row takes ``token_s``, plus ``pair_s`` per token before it (attention, relevant for
    prompts of tens of thousands of tokens). Each output token takes ``answer_s``, the marginal cost
    of a row in a decode step.

    Raises (on creation or decoding):
        ValueError: a time is invalid.
    """

    token_s: Seconds
    pair_s: Seconds = 0.0
    answer_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if not all(
            0 <= seconds <= MAX_SECONDS for seconds in (self.token_s, self.pair_s, self.answer_s)
        ):
            raise ValueError(f"{self.token_s}, {self.pair_s}, {self.answer_s} are not valid times")

    @classmethod
    def from_times(cls, times: RingTimes) -> "RequestCosts | None":
        """The costs of a ring; ``None`` if its stages have not been measured."""
        if not times.profiles or not all(profile.is_known for profile in times.profiles):
            return None
        none = times.prompt_s(0)
        short, long = (times.prompt_s(rows) - none for rows in (_SHORT, _LONG))
        pair = max(0.0, 2 * (long / _LONG - short / _SHORT) / (_LONG - _SHORT))
        token = max(0.0, short / _SHORT - pair * _SHORT / 2)
        answer = max(
            (profile.decode_s(_MANY) - profile.decode_s(_FEW)) / (_MANY - _FEW)
            for profile in times.profiles
        )
        return cls(token, pair, max(0.0, answer))

    def prefill_s(self, rows: int, before: int = 0) -> float:
        """Seconds of ``rows`` prompt tokens after ``before`` others."""
        return rows * (self.token_s + self.pair_s * (before + rows / 2))


#: For an unknown pipeline, where only the comparison of requests matters.
UNKNOWN_COSTS = RequestCosts(token_s=1e-3, answer_s=1e-3)
