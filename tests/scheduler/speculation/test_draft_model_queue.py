"""Requests to the draft model: exact decisions without a ring."""

from collections.abc import Sequence

import pytest

from molink.facts.drafts import AUTO_DRAFTS, DraftBatch, DraftModelFacts, DraftResults, DraftTokens
from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.request_state import RequestState
from molink.scheduler.speculation.base import DraftProposal
from molink.scheduler.speculation.draft_model_queue import MAX_MODEL_DRAFTS
from molink.scheduler.speculation.round_trip_costs import RingLoad
from molink.scheduler.speculation.speculation import Speculation
from molink.wire.messages.data_plane import SamplingParams
from tests.support.request_states import arrived, make_state

#: Each row adds 1 ms at each of two stages; a pass of the draft model takes 2 ms.
STAGE = Profile(decode=((1, 0.010), (101, 0.110)), prefill=((16, 0.040), (116, 0.240)))
FAR, NEAR = ((LinkFacts(seconds, None),) * 2 for seconds in (0.1, 0.0))
ROOM = 100


class Nothing:
    """Finds no n-grams."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal()


class Found:
    """Finds a match of six tokens."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal([5] * count, 6)


def speculation(
    links: Sequence[LinkFacts] = FAR,
    setting: int = AUTO_DRAFTS,
    pass_s: float = 0.002,
    context: int = 4096,
    source: type = Nothing,
) -> Speculation:
    profile = Profile(decode=((1, pass_s),), prefill=((16, pass_s), (1016, pass_s + 1000 * 0.0001)))
    model = DraftModelFacts(profile, context)
    config = SchedulerConfig(
        64, 4, 0, num_stages=2, num_speculative_tokens=setting, draft_model=model
    )
    made = Speculation(config, source)
    made.set_times(RingTimes((STAGE, STAGE), links, 0))
    made.draft_queue.draft_yield.num_recorded = 100  # enough to request drafts for all
    return made


def new_state(tokens: int = 2, answer: int = 1000) -> RequestState:
    prompt = tuple(range(tokens))
    return arrived(
        make_state("d", "r", prompt, tokens, answer, SamplingParams(), credit_window=1 << 20)
    )


def load(rows: int = 1, flying: int = 1, prefilling: bool = False) -> RingLoad:
    return RingLoad(rows, flying, 0, prefilling)


def asked(
    of: Speculation, states: Sequence[RequestState], at: RingLoad | None = None
) -> DraftBatch | None:
    of.ask_draft_model(states, at or load(len(states)))
    return of.draft_queue.pop_batch()


def answer(of: Speculation, order: DraftBatch, *tokens: int, chance: float = 0.5) -> None:
    drafts = [
        DraftTokens(ask.request, tokens, (chance,) * len(tokens))
        for ask in order.requests
        if ask.max_drafts
    ]
    of.draft_queue.on_results(DraftResults(drafts, 0.002 * len(tokens)))


def run_iteration(of: Speculation, one: RequestState, right: int) -> list[int]:
    """Run one request's iteration, in which ``right`` drafts are right; returns the drafts."""
    order = asked(of, [one])
    if order is not None:
        answer(of, order, 7, 8, 9)
    drafts = [list(each) for _, each in of.choose_drafts([one], load(), ROOM)]
    if drafts:
        of.on_verified(one, len(drafts[0]), min(right, len(drafts[0])))
    one.tokens += range(1 + right)
    return drafts[0] if drafts else []


def test_a_request_waits_for_the_draft_model() -> None:
    made, one = speculation(), new_state()
    order = asked(made, [one])
    assert order is not None
    (ask,) = order.requests
    assert (ask.position, ask.tokens, ask.max_drafts) == (0, (0, 1), MAX_MODEL_DRAFTS)
    assert made.draft_queue.is_waiting(one)
    assert asked(made, [one]) is None
    answer(made, order, 7, 8)
    assert not made.draft_queue.is_waiting(one)
    assert asked(made, [one]) is None, "drafted at this position already"
    assert made.choose_drafts([one], load(), ROOM) == [(one, (7, 8))]
    made.on_verified(one, 2, 1)
    one.tokens += [7, 3]
    order = asked(made, [one])
    assert order is not None
    assert (order.requests[0].position, order.requests[0].tokens) == (2, (7, 3))


def test_further_drafts_must_pay_off() -> None:
    # A pass takes 2 ms and a row 2 ms; the round trip takes 220 ms, or 20 ms.
    for links, least in ((FAR, 1.2 * 4 / 220), (NEAR, 1.2 * 4 / 20)):
        order = asked(speculation(links), [new_state()])
        assert order is not None
        assert order.requests[0].min_probability == pytest.approx(least)


def test_a_costly_model_is_not_used() -> None:
    # A request is expected to gain 1.2 tokens by three passes and rows, which is 1.8 times their
    # cost.
    assert asked(speculation(pass_s=0.040), [new_state()]) is not None
    assert asked(speculation(pass_s=0.060), [new_state()]) is None
    assert asked(speculation(NEAR, pass_s=0.008), [new_state()]) is None
    # These volumes keep the stages busy all the time.
    assert asked(speculation(NEAR), [new_state() for _ in range(20)], load(20, 2)) is None


def test_a_model_slower_than_its_profile_is_not_used() -> None:
    made, one = speculation(pass_s=0.010), new_state()
    passes = 0
    while (order := asked(made, [one])) is not None:
        draft = DraftTokens(order.requests[0].request, (7,), (0.9,))
        made.draft_queue.on_results(DraftResults([draft], 0.2))
        one.tokens.append(3)
        passes += 1
        assert passes < 10
    assert passes > 1


def test_a_stalled_model_is_retried() -> None:
    made, one = speculation(pass_s=0.010), new_state()
    order = asked(made, [one])
    for _ in range(10):
        assert order is not None
        made.draft_queue.on_results(
            DraftResults([DraftTokens(order.requests[0].request, (7,), (0.9,))], 60.0)
        )
        one.tokens.append(3)
        order = asked(made, [one])
        if order is None:
            break
    assert order is None
    passes = 0
    while asked(made, [one]) is None:
        passes += 1
        assert passes < 1000
    assert passes > 10


def test_equally_likely_n_grams_come_first() -> None:
    made, one = speculation(source=Found), new_state()
    assert asked(made, [one]) is None
    assert made.choose_drafts([one], load(), ROOM)[0][1][0] == 5


def test_no_model_drafts_beside_prompts_or_forced_tokens() -> None:
    made, one = speculation(), new_state()
    assert asked(made, [one], load(prefilling=True)) is None
    made.on_forced(one, [7, 8])
    assert asked(made, [one]) is None
    assert asked(speculation(context=9), [new_state(2)]) is None


def test_a_wrong_model_is_used_rarely() -> None:
    made = speculation()
    first, drafted = new_state(), 0
    for _ in range(400):
        drafted += bool(run_iteration(made, first, 0))
    # A retry costs a 50th of a round trip, for one draft and its row.
    assert 5 < drafted < 120
    assert made.draft_queue.draft_seconds < 0.01 * 400 * 0.22
    # Other requests share the record of wrong drafts.
    other, drafted = new_state(), 0
    for _ in range(50):
        drafted += bool(run_iteration(made, other, 0))
    assert drafted < 10


def test_a_right_model_is_always_used() -> None:
    made, one = speculation(), new_state()
    assert [run_iteration(made, one, 3) for _ in range(5)] == [[7, 8, 9]] * 5
    assert made.num_accepted == 15
    assert made.draft_queue.num_drafted == 15


def test_probabilities_combine_the_model_and_its_record() -> None:
    made, one = speculation(), new_state()
    for right in (1, 0, 0, 0):
        run_iteration(made, one, right)
    assert one.drafter is not None
    assert one.drafter.model_record.success_ratio < 1.0
    expected = 0.5 * one.drafter.model_record.success_ratio
    order = asked(made, [one])
    assert order is not None
    answer(made, order, 7, 8, chance=0.5)
    one.drafter.propose_drafts(one.tokens, 9)
    assert one.drafter.probability_at(len(one.tokens)) == pytest.approx(expected)


def test_long_prompts_are_sent_in_the_background() -> None:
    made, one = speculation(), new_state(1000)
    known = []
    while True:
        order = asked(made, [one])
        assert order is not None
        (ask,) = order.requests
        known.append((ask.position, len(ask.tokens), ask.max_drafts > 0))
        if ask.max_drafts:
            break
        assert not made.draft_queue.is_waiting(one)
        answer(made, order)
    assert known == [(0, 512, False), (512, 488, False), (1000, 0, True)]
    # Prefilling takes 0.1 ms per token, so each of the next 64 tokens must save about 20 ms.
    assert asked(speculation(), [new_state(100_000)]) is None


def test_a_volume_waits_as_a_whole() -> None:
    made = speculation()
    one, other = new_state(), new_state()
    made.on_forced(other, [7, 8])
    order = asked(made, [one, other])
    assert order is not None
    assert len(order.requests) == 1
    assert made.draft_queue.is_waiting(one)
    assert made.draft_queue.is_waiting(other)
    answer(made, order, 5)
    assert not made.draft_queue.is_waiting(one)
    assert not made.draft_queue.is_waiting(other)


def test_an_unknown_model_gets_one_request_per_volume() -> None:
    made = speculation()
    made.draft_queue.draft_yield.num_recorded = 0
    order = asked(made, [new_state() for _ in range(4)])
    assert order is not None
    assert len(order.requests) == 1


def test_ended_requests_are_dropped() -> None:
    made, one, other = speculation(), new_state(), new_state()
    order = asked(made, [one, other])
    assert order is not None
    made.draft_queue.drop_request(one)
    answer(made, order, 7)
    after = made.draft_queue.pop_batch()
    assert after == DraftBatch(finished=(order.requests[0].request,))
    made.draft_queue.on_results(DraftResults())
    # This one ends before its draft request is sent.
    other.tokens.append(9)
    made.ask_draft_model([other], load())
    made.draft_queue.drop_request(other)
    after = made.draft_queue.pop_batch()
    assert after == DraftBatch(finished=(order.requests[1].request,))
    assert made.draft_queue.is_waiting(other)
    made.draft_queue.on_results(DraftResults())
    assert not made.draft_queue.is_waiting(other)
    assert made.draft_queue.pop_batch() is None


def test_a_failed_model_is_not_used() -> None:
    made, one = speculation(), new_state()
    assert asked(made, [one]) is not None
    made.draft_queue.on_results(DraftResults(failed=True))
    assert not made.draft_queue.is_waiting(one)
    assert not made.draft_queue.has_model
    assert asked(made, [one]) is None
    made.draft_queue.drop_request(one)


@pytest.mark.parametrize("setting", [0, 3])
def test_a_fixed_number_of_model_drafts(setting: int) -> None:
    made = speculation(NEAR, setting, pass_s=1.0)
    assert made.draft_queue.has_model == (setting > 0)
    if setting:
        order = asked(made, [new_state(600)])
        assert order is not None
        assert (len(order.requests[0].tokens), order.requests[0].max_drafts) == (600, 3)
