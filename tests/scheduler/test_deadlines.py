"""Deadlines at a head: who goes first, who is refused and when, and that nobody starves."""

import pytest
from tests.head.test_waits import ScriptedRing

from molink.errors import Overloaded, RequestError
from molink.facts.profile import Profile
from molink.facts.ring_times import RingTimes
from molink.scheduler.request_state import DEFAULT_START_S

#: A prompt token takes a tenth of a second.
SLOW = Profile(decode=((1, 0.1),), prefill=((1, 0.1), (1024, 102.4)))


def admissions(ring: ScriptedRing) -> list[str]:
    """Serve all requests; returns their keys as they were admitted."""
    found: list[str] = []
    while live := ring.head.live:
        found += [key for peer, key in live if ring.is_admitted(key, peer) and key not in found]
        ring.step()
    return found


def test_who_has_the_least_slack_goes_first_among_the_requests_of_a_client() -> None:
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
    ring.head.set_times(RingTimes((SLOW,), (), 0))
    ring.submit("runs", answer=4)
    ring.step()
    ring.submit("short", answer=4, tokens=2, deadline_s=28.0)
    ring.submit("long", answer=4, tokens=60, deadline_s=30.0)
    assert admissions(ring) == ["runs", "long", "short"]


def test_requests_with_deadlines_starve_none_without() -> None:
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
    assert ring.now > DEFAULT_START_S - 20 - 4, "those with deadlines that came before went first"


def test_a_request_is_refused_at_once_when_no_token_of_it_could_come_in_time() -> None:
    ring = ScriptedRing(max_num_seqs=2)
    for number in range(14):
        ring.submit(f"r{number}", answer=20)
    while ring.head._roster.waiting > 6:
        ring.step()
    expected = r"first token would come in about \d+ s.* within 10\.0 s \(`timeout`\)"
    with pytest.raises(Overloaded, match=expected) as told:
        ring.submit("hurried", deadline_s=10.0, priority=1)
    assert told.value.retry_after > 5
    # Its slack is the least, so it goes first: the next place is free in time.
    ring.submit("first", deadline_s=20.0)
    # Whose answer had begun at a head that is lost goes on: what it has is worth something.
    ring.submit("begun", tokens=10, prompt_tokens=9, deadline_s=0.5, priority=1)
    while not ring.is_admitted("first"):
        ring.step()
    assert not ring.rejections()
    assert ring.head.stats()[0]["head_late_total"] == 1


def test_a_prompt_that_takes_longer_than_its_deadline_is_no_matter_of_load() -> None:
    ring = ScriptedRing()
    ring.submit("unknown", tokens=60, deadline_s=5.0)
    ring.head.set_times(RingTimes((SLOW,), (), 0))
    with pytest.raises(RequestError, match=r"the prompt alone takes 6\.0 s or more") as told:
        ring.submit("long", tokens=60, deadline_s=5.0)
    assert told.value.param == "timeout"
    ring.submit("long", tokens=60, deadline_s=7.0)


def test_who_waits_until_no_token_can_come_in_time_is_told() -> None:
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
    assert "in time for an answer within 6.0 s" in told.message
    # "runs" has 86 of its 100 tokens before it, at 2 a second.
    assert 35 <= told.retry_after <= 60


def test_one_that_gave_way_goes_before_every_deadline() -> None:
    ring = ScriptedRing(max_num_seqs=2, blocks=14)
    ring.submit("old", answer=40)
    ring.submit("young", answer=40)
    while ring.is_admitted("young") or ring.now < 2:
        ring.step()
        assert ring.now < 20, "14 blocks of 4 tokens hold both"
    ring.submit("new", answer=4, deadline_s=30.0)
    ring.submit("urgent", answer=4, priority=-1)
    assert [state.request.key for state in ring.waiting()] == ["urgent", "young", "new"]
