"""Limits of the queue: waits and deadlines, on a ring with a fixed iteration time."""

from random import Random

import pytest

from molink.errors import Overloaded, RequestError, UsageError
from molink.facts.profile import Profile
from molink.facts.ring_times import RingTimes
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.queue_limits import ServingRate
from molink.scheduler.request_state import DEFAULT_START_S, Emission, RequestState
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import (
    Release,
    RequestSlice,
    SampledId,
    SamplerOutput,
    SamplingParams,
)
from molink.wire.messages.serving import Rejected
from tests.support.request_states import make_state

#: Seconds of each iteration.
STEP_S = 0.5
STOP = 99


class ScriptedRing:
    """A scheduler whose volumes return after :data:`STEP_S` and whose releases return at once."""

    def __init__(self, **changes: float) -> None:
        fields = {"num_blocks": 128, "block_size": 4, "micro_batches": 1, "prefix_cache": False}
        fields |= {"max_num_batched_tokens": 64, **changes}
        self.scheduler = Scheduler(SchedulerConfig(**fields), 1)
        self.now = 0.0
        self.told: list[Emission] = []
        #: Lengths of answers that end early, by key.
        self.lengths: dict[str, int] = {}

    def submit(self, key: str, answer: int = 20, tokens: int = 10, **fields: object) -> None:
        given = {"peer": "d", "credit_window": 1 << 16, **fields}
        peer = str(given.pop("peer"))
        prompt, own = tuple(range(tokens)), given.pop("prompt_tokens", tokens)
        request = make_state(peer, key, prompt, own, answer, SamplingParams(), (STOP,), **given)
        self.told += self.scheduler.submit_request(request, self.now)

    def step(self) -> None:
        batch = self.scheduler.next_batch(self.now)
        self.now += STEP_S
        self.told += self.scheduler.expire_requests(self.now)
        for volume in batch.volumes if batch is not None else ():
            choices = tuple(map(self._choice, volume.header.slices))
            self.told += self.scheduler.on_sampled(
                SamplerOutput(volume.header.seq, choices), {}, self.now
            )
        for each in batch.controls if batch is not None else ():
            if isinstance(each.body, Release):
                self.scheduler.on_released(each.body.seq, self.now)
        self.scheduler.validate()

    def _choice(self, rows: RequestSlice) -> SampledId:
        state = self.scheduler._queues.get_by_id(rows.request)
        assert state is not None, "all prompts fit into one chunk"
        assert rows.sample
        ends = state.num_generated + 1 == self.lengths.get(state.key)
        return SampledId(rows.request, rows.start + rows.count, STOP if ends else 50)

    def is_admitted(self, key: str, peer: str = "d") -> bool:
        state = self.scheduler._queues.find_request(peer, key)
        return state is None or state.phase != "waiting"

    def waiting(self) -> list[RequestState]:
        """Waiting requests in order of admission."""
        queues = self.scheduler._queues
        return queues.fair_shares.order_waiting(queues.waiting_requests)

    def rejections(self) -> dict[str, Rejected]:
        found = [each.message for each in self.told if isinstance(each.message, Rejected)]
        return {message.key: message for message in found}


def test_the_rate_counts_busy_time_only() -> None:
    serving = ServingRate()
    serving.observe_total(0, 0.0, busy=True)
    assert serving.rate is None
    for second in range(1, 11):
        serving.observe_total(40 * second, float(second), busy=second < 10)
    assert serving.rate == pytest.approx(40, rel=0.02)
    serving.observe_total(400, 1000.0, busy=True)
    assert serving.rate == pytest.approx(40, rel=0.02), "idle time does not count"
    serving.observe_total(400, 1030.0, busy=True)
    assert serving.rate < 20, "busy time counts"


@pytest.mark.parametrize(("known", "within"), [(True, 2.0), (False, 6.0)])
def test_the_estimated_slot_is_about_right(known: bool, within: float) -> None:
    """Two run and two wait. Answers of 20 to 39 tokens at 2/s free a slot after 4 to 15 s.

    ``known`` is whether ``max_tokens`` is each answer's length, so that the scheduler knows it.
    """
    ring = ScriptedRing(max_num_seqs=2, max_queue_len=2)
    sizes, errors, waits = Random(7), [], []
    for round_ in range(12):
        for number in range(4):
            key = f"{round_}.{number}"
            ring.lengths[key] = sizes.randint(20, 39)
            ring.submit(key, answer=ring.lengths[key] if known else 500)
        for _ in range(3 + round_ % 10):
            ring.step()
        with pytest.raises(Overloaded) as caught:
            ring.submit("more")
        asked = ring.now
        while ring.scheduler._queues.num_waiting == 2:
            ring.step()
        waits.append(ring.now - asked)
        errors.append(caught.value.retry_after - waits[-1])
        while ring.scheduler.live_requests:
            ring.step()
    assert max(waits) - min(waits) > 7
    # Until an answer has ended, only `max_tokens` tells its length.
    assert max(abs(error) for error in errors[1:]) <= within


def test_an_estimated_wait_beyond_the_limit_rejects_on_arrival() -> None:
    ring = ScriptedRing(max_num_seqs=2)
    for number in range(14):
        ring.submit(f"r{number}", answer=20)
    while ring.scheduler._queues.num_waiting > 6:
        ring.step()
    # Two of 20 tokens end about every 10 s; with 6 waiting, a seventh starts after 38 s.
    with pytest.raises(
        Overloaded, match=r"about \d+ s; its limit is 20 s .`max_queue_time`."
    ) as told:
        ring.submit("hurried", max_queue_s=20.0)
    ring.submit("patient", max_queue_s=60.0)
    # Another client has its own share, so it does not wait for all others.
    ring.submit("other", max_queue_s=20.0, client="other")
    at = ring.now
    while not ring.is_admitted("patient"):
        ring.step()
    assert 20 < ring.now - at < 60
    assert told.value.retry_after == pytest.approx(ring.now - at - 20, abs=8)
    assert not ring.rejections(), "admitted requests meet their deadline"
    counters, _ = ring.scheduler.collect_stats()
    assert counters["scheduler_late_total"] == 1


def test_waiting_beyond_the_limit_rejects() -> None:
    ring = ScriptedRing(max_num_seqs=1, max_queue_s=5.0)
    ring.submit("runs", answer=100)
    ring.submit("default limit")
    ring.submit("longer", max_queue_s=8.0)
    ring.submit("long", max_queue_s=80.0)
    while ring.now < 7:
        ring.step()
    assert list(ring.rejections()) == ["default limit"]
    while ring.now < 20:
        ring.step()
    told = ring.rejections()
    assert list(told) == ["default limit", "longer"]
    assert told["longer"].reason == "overloaded"
    assert "was not started within 8 s" in told["longer"].message
    assert told["longer"].retry_after > 1
    assert [key for _, key in ring.scheduler.live_requests] == ["runs", "long"]
    while ring.scheduler.live_requests:
        ring.step()
    counters, _ = ring.scheduler.collect_stats()
    assert counters["scheduler_expired_total"] == 2
    # "runs" starts at once, and "long" after its 100 tokens at 2/s.
    assert (counters["scheduler_admitted_total"], counters["scheduler_queue_seconds_total"]) == (
        2,
        50.0,
    )


#: A prompt token takes 0.1 s.
SLOW = Profile(decode=((1, 0.1),), prefill=((1, 0.1), (1024, 102.4)))


def admissions(ring: ScriptedRing) -> list[str]:
    """Serve all requests; returns their keys in order of admission."""
    found: list[str] = []
    while live := ring.scheduler.live_requests:
        found += [key for peer, key in live if ring.is_admitted(key, peer) and key not in found]
        ring.step()
    return found


def test_a_clients_requests_run_by_slack() -> None:
    ring = ScriptedRing(max_num_seqs=1)
    ring.submit("runs", answer=4)
    ring.step()
    ring.submit("any time", answer=4)
    ring.submit("late", answer=4, deadline_s=DEFAULT_START_S + 5)
    ring.submit("soon", answer=4, deadline_s=50.0)
    ring.submit("sooner", answer=4, deadline_s=40.0)
    ring.submit("urgent", answer=4, priority=-1)
    ring.submit("other", answer=4, deadline_s=30.0, client="other")
    assert admissions(ring) == ["runs", "other", "urgent", "sooner", "soon", "any time", "late"]
    assert not ring.rejections()


def test_a_long_prompt_has_less_slack_than_a_short_one() -> None:
    ring = ScriptedRing(max_num_seqs=1)
    ring.scheduler.set_times(RingTimes((SLOW,), (), 0))
    ring.submit("runs", answer=4)
    ring.step()
    ring.submit("short", answer=4, tokens=2, deadline_s=28.0)
    ring.submit("long", answer=4, tokens=60, deadline_s=30.0)
    assert admissions(ring) == ["runs", "long", "short"]


def test_deadlines_do_not_starve_other_requests() -> None:
    ring, refused = ScriptedRing(max_num_seqs=1), 0
    ring.submit("runs", answer=8)
    ring.step()
    ring.submit("patient", answer=4)
    while not ring.is_admitted("patient"):
        try:
            ring.submit(f"hurried at {ring.now}", answer=4, deadline_s=20.0)
        except Overloaded:
            refused += 1
        ring.step()
        assert ring.now <= DEFAULT_START_S + 4
    assert refused
    assert ring.now > DEFAULT_START_S - 20 - 4, "earlier deadlines go first"


def test_an_unreachable_deadline_rejects_on_arrival() -> None:
    ring = ScriptedRing(max_num_seqs=2)
    for number in range(14):
        ring.submit(f"r{number}", answer=20)
    while ring.scheduler._queues.num_waiting > 6:
        ring.step()
    expected = r"first token would take about \d+ s.* within 10\.0 s \(`timeout`\)"
    with pytest.raises(Overloaded, match=expected) as told:
        ring.submit("hurried", deadline_s=10.0, priority=1)
    assert told.value.retry_after > 5
    # "first" has the least slack, so it goes first, and the next slot is free in time.
    ring.submit("first", deadline_s=20.0)
    # A resubmitted request is admitted in spite of its deadline.
    ring.submit("begun", tokens=10, prompt_tokens=9, deadline_s=0.5, priority=1)
    while not ring.is_admitted("first"):
        ring.step()
    assert not ring.rejections()
    assert ring.scheduler.collect_stats()[0]["scheduler_late_total"] == 1


def test_a_prefill_beyond_the_deadline_is_a_request_error() -> None:
    ring = ScriptedRing()
    ring.submit("unknown", tokens=60, deadline_s=5.0)
    ring.scheduler.set_times(RingTimes((SLOW,), (), 0))
    with pytest.raises(RequestError, match=r"the prompt alone takes 6\.0 s or more") as told:
        ring.submit("long", tokens=60, deadline_s=5.0)
    assert told.value.param == "timeout"
    ring.submit("long", tokens=60, deadline_s=7.0)


def test_waiting_beyond_the_deadline_rejects() -> None:
    ring = ScriptedRing(max_num_seqs=1)
    ring.submit("runs", answer=100)
    ring.step()
    ring.submit("waits", deadline_s=6.0)
    ring.submit("begun", tokens=10, prompt_tokens=9, deadline_s=6.0)
    while ring.now < 6:
        ring.step()
    assert not ring.rejections()
    while ring.now < 7:
        ring.step()
    (told,) = ring.rejections().values()
    assert (told.key, told.reason) == ("waits", "overloaded")
    assert "in time to finish within 6.0 s" in told.message
    # "runs" has 86 of its 100 tokens left at 2/s.
    assert 35 <= told.retry_after <= 60


def test_preempted_requests_precede_deadlines() -> None:
    ring = ScriptedRing(max_num_seqs=2, num_blocks=14)
    ring.submit("old", answer=40)
    ring.submit("young", answer=40)
    while ring.is_admitted("young") or ring.now < 2:
        ring.step()
        assert ring.now < 20, "14 blocks of 4 tokens hold both"
    ring.submit("new", answer=4, deadline_s=30.0)
    ring.submit("urgent", answer=4, priority=-1)
    assert [state.key for state in ring.waiting()] == ["urgent", "young", "new"]


@pytest.mark.parametrize(
    "changes", [{"num_blocks": 0}, {"micro_batches": 65}, {"max_num_batched_tokens": -1}]
)
def test_config_values_out_of_range_are_rejected(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        SchedulerConfig(**{"num_blocks": 4, "block_size": 4, "micro_batches": 2, **changes})


def test_blocks_for_tokens() -> None:
    config = SchedulerConfig(4, 16, 1)
    assert [config.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
