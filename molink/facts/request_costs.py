"""What a request takes of a pipeline, in seconds: regressions over what its stages measured."""

from typing import Annotated

import msgspec

from molink.facts.ring_times import RingTimes

#: Of a token: whatever is above is no measurement.
MAX_SECONDS = 1e6
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]

#: Rows of the prompts that the regression of a prefill goes through.
_SHORT, _LONG = 1024, 8192
#: Streams that the marginal cost of a decode row is taken between.
_FEW, _MANY = 1, 32


class RequestCosts(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that requests keep a pipeline's slowest stage.

    Each prefill row takes ``token_s`` and, for each token before it, ``pair_s`` (attention, which
    counts with prompts of ten thousands of tokens). Each token of an answer takes ``answer_s``:
    what a further row adds to a decode step that there would be anyway.

    Raises (on making or decoding one):
        ValueError: a time is not a number.
    """

    token_s: Seconds
    pair_s: Seconds = 0.0
    answer_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if not all(
            0 <= seconds <= MAX_SECONDS for seconds in (self.token_s, self.pair_s, self.answer_s)
        ):
            raise ValueError(f"{self.token_s}, {self.pair_s}, {self.answer_s} are no seconds")

    @classmethod
    def from_times(cls, times: RingTimes) -> "RequestCosts | None":
        """Those of a ring; ``None`` if its stages have not been measured."""
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


#: Of a pipeline that has told nothing yet: only how requests compare matters then.
UNKNOWN_COSTS = RequestCosts(token_s=1e-3, answer_s=1e-3)
