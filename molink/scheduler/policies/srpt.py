"""Shortest remaining processing time: an oracle for simulations."""

from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.ranked import Rank, RankedPolicy
from molink.scheduler.request_state import RequestState


class Srpt(RankedPolicy):
    """Prioritizes requests with the least remaining prompt and answer.

    It takes ``max_tokens`` as the length of the answer, which holds for simulated clients only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arrival_numbers: dict[RequestState, int] = {}
        self._num_arrivals = 0
        #: Memo of seconds by number of prompt rows, and per token.
        self._prompt_s: dict[int, float] = {}
        self._token_s = 0.0

    def set_times(self, times: RingTimes) -> None:
        super().set_times(times)
        self._prompt_s, self._token_s = {}, times.round_trip_s(1)

    def on_arrived(self, state: RequestState, now: float) -> None:
        self._arrival_numbers[state] = self._num_arrivals
        self._num_arrivals += 1

    def on_removed(self, state: RequestState, now: float) -> None:
        del self._arrival_numbers[state]

    def rank_request(self, state: RequestState, now: float) -> Rank:
        """Rank by remaining seconds."""
        rows = len(state.tokens) - (state.num_issued if state.phase != "waiting" else 0)
        if rows not in self._prompt_s:
            self._prompt_s[rows] = self.ring_times.prompt_s(rows) if rows > 0 else 0.0
        more = state.max_remaining - (rows > 0)
        return self._prompt_s[rows] + more * self._token_s, 0.0, self._arrival_numbers[state]
