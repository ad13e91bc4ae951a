"""Skip-join MLFQ: a multi-level feedback queue that foresees prefills (FastServe, §4.1)."""

from molink.scheduler.policies.mlfq import Mlfq
from molink.scheduler.request_state import RequestState


class SkipJoinMlfq(Mlfq):
    """A new job skips the queues whose quantum is shorter than its prefill.

    That is predicted by the stages' profiles and links, for the tokens that the prefix cache lacks.
    A job that is demoted skips those whose quantum is shorter than its next iteration: the rest of
    its prompt, if it has not been issued yet.
    """

    def initial_level(self, state: RequestState) -> int:
        """The first queue whose quantum covers its prefill."""
        return self.level_for(self.ring_times.prompt_s(state.num_uncached))

    def demoted_level(self, state: RequestState, level: int) -> int:
        """The next queue, or a later one whose quantum covers the rest of its prompt."""
        rest = len(state.tokens) - state.num_issued
        return max(level + 1, self.level_for(self.ring_times.prompt_s(rest)) if rest > 1 else 0)
