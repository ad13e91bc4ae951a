"""Numbers of drafts: exact decisions without a ring."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS, MAX_LOOKAHEAD
from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.request_state import RequestState
from molink.scheduler.speculation.base import DraftProposal, DraftSource
from molink.scheduler.speculation.request_drafter import CLASS_PRIORS, RequestDrafter
from molink.scheduler.speculation.round_trip_costs import RingLoad
from molink.scheduler.speculation.speculation import Speculation
from molink.wire.messages.data_plane import SamplingParams
from tests.support.request_states import arrived, make_state

#: Each row adds 1 ms at each of two stages; in a chunk, 2 ms in full tiles of 16.
STAGE = Profile(decode=((1, 0.010), (101, 0.110)), prefill=((16, 0.040), (116, 0.240)), tile=16)
FAR = (LinkFacts(0.1, None),) * 2
NEAR = (LinkFacts(0.0, None),) * 2
ROOM = 100
ALONE = RingLoad(1, 1, 0)


class Counts:
    """Proposes as many drafts as requested."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal(range(count))


class Sure(RequestDrafter):
    """Each draft is right with probability ``sure``."""

    def __init__(self, source: DraftSource, sure: float) -> None:
        super().__init__(source)
        self.sure = sure

    def probability_at(self, position: int) -> float:
        return super().probability_at(position) if position < self._forced_until else self.sure

    @property
    def best_probability(self) -> float:
        return self.sure

    @property
    def is_proven(self) -> bool:
        return True


class Rises:
    """Drafts tokens that each are one more than the one before."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal(list(range(tokens[-1] + 1, tokens[-1] + 1 + count)), 9)


def speculation(links: Sequence[LinkFacts] = FAR, setting: int = AUTO_DRAFTS) -> Speculation:
    made = Speculation(
        SchedulerConfig(64, 4, 0, num_stages=2, num_speculative_tokens=setting), Counts
    )
    made.set_times(RingTimes((STAGE, STAGE), links, 0))
    return made


def pipelined(links: Sequence[LinkFacts] = FAR) -> Speculation:
    config = SchedulerConfig(
        64, 4, 0, num_stages=2, num_speculative_tokens=AUTO_DRAFTS, lookahead_volumes=MAX_LOOKAHEAD
    )
    made = Speculation(config, Counts)
    made.set_times(RingTimes((STAGE, STAGE), links, 0))
    return made


def make_states(count: int, chance: float = 0.0) -> list[RequestState]:
    """Requests whose drafts are right with ``chance``; 0 means that nothing is known."""
    made = []
    for index in range(count):
        state = arrived(
            make_state("d", str(index), (1, 2), 2, 1000, SamplingParams(), credit_window=1 << 20)
        )
        state.id = index
        state.drafter = Sure(Counts(), chance) if chance else RequestDrafter(Counts())
        made.append(state)
    return made


def counts(
    of: Speculation, given: Sequence[RequestState], load: RingLoad, room: int = ROOM
) -> list[int]:
    found = {state.id: len(drafts) for state, drafts in of.choose_drafts(given, load, room)}
    return [found.get(state.id, 0) for state in given]


def test_latency_bound_rings_have_room_for_drafts() -> None:
    # A round trip takes 220 ms and a draft adds 2: worthwhile down to a probability of 0.011.
    alone = RingLoad(1, 1, 0)
    assert counts(speculation(), make_states(1, 0.9), alone) == [MAX_DRAFTS]
    assert counts(speculation(), make_states(1, 0.5), alone) == [5]
    # With more right drafts, the next ones are more likely to be right.
    assert counts(speculation(), make_states(1), alone) == [12]
    assert counts(speculation(), make_states(1, 0.01), alone) == [0]


def test_compute_bound_rings_take_good_drafts_only() -> None:
    # A round trip takes 20 ms; a draft adds a tenth of it.
    alone = RingLoad(1, 1, 0)
    assert counts(speculation(NEAR), make_states(1, 0.9), alone) == [9]
    assert counts(speculation(NEAR), make_states(1, 0.1), alone) == [0]
    # Beside 20 rows in each of two volumes a row costs 2 ms of 58 ms, in which 20 tokens are made.
    full = RingLoad(20, 2, 0)
    assert sum(counts(speculation(NEAR), make_states(20, 0.9), full)) > 0
    assert sum(counts(speculation(NEAR), make_states(20, 0.8), full)) == 0


def test_the_most_probable_drafts_come_first() -> None:
    given = [*make_states(1, 0.2), *make_states(1, 0.9), *make_states(1, 0.6)]
    for index, state in enumerate(given):
        state.id = index
    # 0.9, 0.81, 0.73, 0.66, 0.6, …
    assert counts(speculation(), given, RingLoad(3, 1, 0), room=5) == [0, 4, 1]


@pytest.mark.parametrize("setting", [1, 3, MAX_DRAFTS])
def test_a_fixed_number_needs_no_estimate(setting: int) -> None:
    fixed = speculation(NEAR, setting)
    assert counts(fixed, make_states(3, 0.01), RingLoad(3, 2, 0, True)) == [setting] * 3


def test_speculation_can_be_disabled() -> None:
    assert speculation(setting=0).choose_drafts(make_states(1, 1.0), RingLoad(1, 1, 0), ROOM) == []


def test_unknown_stages_get_no_drafts() -> None:
    made = speculation()
    made.set_times(RingTimes((STAGE, Profile()), FAR, 0))
    assert counts(made, make_states(1, 0.9), RingLoad(1, 1, 0)) == [0]
    (state,) = make_states(1)
    made.on_forced(state, [7])
    assert counts(made, [state], RingLoad(1, 1, 0)) == [0]
    made.set_times(RingTimes((STAGE, STAGE), FAR, 0))
    assert counts(made, make_states(1, 0.9), RingLoad(1, 1, 0)) == [MAX_DRAFTS]


def test_piggybacked_chunks_limit_drafts_to_a_tile() -> None:
    # 15 drafts fit into the chunk's tile for free; another one costs 2 * 32 ms.
    chunks = RingLoad(1, 1, 0, has_prefill=True)
    assert counts(speculation(), make_states(1, 0.9), chunks) == [MAX_DRAFTS]
    assert counts(speculation(), make_states(1, 0.36), chunks) == [4]
    assert counts(speculation(), make_states(1), chunks) == [0]
    assert counts(speculation(NEAR), make_states(1, 0.5), chunks) == [0]


def test_wrong_drafts_pause_and_are_retried() -> None:
    made, (state,) = speculation(NEAR), make_states(1)
    alone, passes = RingLoad(1, 1, 0), 0
    while made.choose_drafts([state], alone, ROOM):
        made.on_verified(state, 1, 0)
        passes += 1
    assert passes == 6
    rested = 0
    while not made.choose_drafts([state], alone, ROOM):
        rested += 1
    assert 10 < rested < 100
    made.on_verified(state, 1, 1)
    assert len(made.choose_drafts([state], alone, ROOM)) == 1
    assert made.num_accepted == 1


def test_drafts_after_a_wrong_one_are_not_recorded() -> None:
    one, other = RequestDrafter(Counts()), RequestDrafter(Counts())
    one.on_verified(0, 2, 1)
    other.on_verified(0, 9, 1)
    assert one.probability_at(0) == other.probability_at(0)
    one.on_verified(0, 3, 3)
    assert one.is_proven


FORCED = [7, 8, 9]


def test_forced_tokens_pay_off_without_a_margin() -> None:
    # Beside 20 rows in each of two volumes, a further row yields a token and costs less than one.
    full = RingLoad(20, 2, 0)
    given = make_states(20)
    made = speculation(NEAR)
    assert sum(counts(made, given, full)) == 0
    made.on_forced(given[3], FORCED)
    assert made.choose_drafts(given, full, ROOM) == [(given[3], FORCED)]
    assert made.choose_drafts(given, full, 2) == [(given[3], FORCED[:2])]


def test_forced_tokens_do_not_affect_the_record() -> None:
    made, (state,) = speculation(), make_states(1, 0.1)
    state.drafter = RequestDrafter(Counts())
    before = state.drafter.best_probability
    for _ in range(20):
        made.on_forced(state, FORCED)
        assert made.choose_drafts([state], ALONE, ROOM) == [(state, FORCED)]
        made.on_verified(state, 3, 3)
    assert (state.drafter.best_probability, state.drafter.is_proven) == (before, False)
    state.tokens.append(5)
    assert made.choose_drafts([state], ALONE, ROOM) != [(state, FORCED)]


def test_forced_tokens_are_used_as_lookahead() -> None:
    made, (state,) = pipelined(), make_states(1, 0.0)
    made.on_forced(state, list(range(9)))
    assert made.choose_drafts([state], ALONE, ROOM, (1,)) == [(state, [0, 1, 2])]
    state.draft_path = [0, 1, 2]
    assert made.choose_lookahead([state], ALONE, (4,), ROOM) == [(state, [3, 4, 5, 6, 7, 8])]


def test_wrong_forced_tokens_reduce_trust() -> None:
    made, (state,) = speculation(NEAR), make_states(1)
    alone, passes = RingLoad(1, 1, 0), 0
    made.on_forced(state, FORCED)
    while made.choose_drafts([state], alone, ROOM):
        made.on_verified(state, 3, 0)
        passes += 1
        assert passes < 30


def test_disabled_drafts_include_forced_tokens() -> None:
    made, (state,) = speculation(setting=0), make_states(1)
    made.on_forced(state, FORCED)
    assert made.choose_drafts([state], RingLoad(1, 1, 0), ROOM) == []


def test_probability_grows_with_matching_tokens() -> None:
    made = RequestDrafter(Counts())
    made.propose_drafts((1, 2), 9)
    assert [made.probability_at(2 + at) for at in range(5)] == [*CLASS_PRIORS[:4], CLASS_PRIORS[3]]
    assert made.probability_at(2 + 8) == made.probability_at(2 + 100) == CLASS_PRIORS[-1]
    made.on_verified(2, 3, 3)
    assert made.probability_at(2) > CLASS_PRIORS[0]
    made.on_verified(2, 1, 0)
    made.on_verified(2, 1, 0)
    after = made.probability_at(2)
    # A wrong draft counts less if it was unlikely.
    made.propose_drafts((1, 2, 3), 9)
    made.on_verified(9, 1, 0)
    assert made.probability_at(3) < 0.8 * after


# --- ahead ----------------------------------------------------------------------------------------


def ahead(
    of: Speculation, given: Sequence[RequestState], flying: Sequence[int] = (1,)
) -> list[int]:
    found = {
        state.id: len(drafts) for state, drafts in of.choose_lookahead(given, ALONE, flying, ROOM)
    }
    return [found.get(state.id, 0) for state in given]


def make_in_flight(chance: float, path: int) -> RequestState:
    """A request with ``path`` drafts in flight."""
    (state,) = make_states(1, chance)
    assert state.drafter is not None
    state.draft_path = list(state.drafter.propose_drafts(state.tokens, 99))[:path]
    return state


def test_likely_paths_get_lookahead() -> None:
    # A round trip takes 220 ms. A volume of 6 rows takes 15 ms, half of which delays others: 0.033.
    made = pipelined()
    assert ahead(made, [make_in_flight(0.9, 15)]) == [6]
    assert ahead(made, [make_in_flight(0.9, 35)]) == [0]
    assert ahead(made, [make_in_flight(0.5, 3)]) == [6]
    assert ahead(made, [make_in_flight(0.5, 4)]) == [0]
    assert ahead(made, make_states(1, 0.9)) == [0], "no proposal"


def test_the_most_likely_path_gets_lookahead() -> None:
    likely, less = make_in_flight(0.9, 2), make_in_flight(0.9, 3)
    less.id = 1
    assert ahead(pipelined(), [less, likely]) == [0, 6]


def test_busy_rings_get_no_lookahead() -> None:
    # Four fifths of a round trip take 176 ms.
    assert ahead(pipelined(), [make_in_flight(0.9, 2)], [1, *[15] * 6]) == [6]
    assert ahead(pipelined(), [make_in_flight(0.9, 2)], [1, *[15] * 7]) == [0]
    assert ahead(pipelined(NEAR), [make_in_flight(0.9, 2)]) == [0]


def test_lookahead_respects_max_tokens() -> None:
    made, state = pipelined(), make_in_flight(0.9, 2)
    state.num_credited = len(state.tokens)
    state.credit_window = 7
    # Room for two drafts, four lookahead tokens, and the token after them.
    assert ahead(made, [state]) == [4]
    state.request, state.credit_window = replace(state.request, max_tokens=5), 1 << 20
    assert ahead(made, [state]) == [2]


def test_used_up_proposals_are_extended() -> None:
    made, state = pipelined(), make_in_flight(0.99, 99)
    assert ahead(made, [state]) == [0]
    state.tokens += state.draft_path[:90]
    del state.draft_path[:90]
    # Its drafter now proposes other tokens than those in flight.
    assert ahead(made, [state]) == [0]
    state = make_in_flight(0.99, 0)
    state.drafter = Sure(Rises(), 0.99)
    state.draft_path = list(state.drafter.propose_drafts(state.tokens, 99))
    state.tokens += state.draft_path[:90]
    del state.draft_path[:90]
    assert made.choose_lookahead([state], ALONE, (1,), ROOM)[0][1][:3] == [102, 103, 104]
