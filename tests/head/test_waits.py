"""What is said of waits, against a head whose ring takes a fixed time: when a place was free."""

import pytest

from molink.errors import Overloaded
from molink.head.head import Head
from molink.head.limits import HeadLimits
from molink.head.request import Emission, HeadRequest
from molink.head.waits import Pace
from molink.wire.messages.data import Choice, Rejected, Release, Sampled, Sampling

#: Seconds of an iteration, whatever is in it.
STEP_S = 0.5


class ScriptedRing:
    """A head whose volumes all come back after :data:`STEP_S`, and releases at once."""

    def __init__(self, **changes: float) -> None:
        fields = {"blocks": 4096, "block_size": 4, "micro_batches": 1, "prefix_cache": False}
        fields |= {"chunk_tokens": 64, **changes}
        self.head = Head(HeadLimits(**fields), 1)
        self.now = 0.0
        self.told: list[Emission] = []

    def submit(self, key: str, answer: int = 20, tokens: int = 10, **fields: object) -> None:
        given = {"owner": "d", "window": 1 << 16, **fields}
        owner = str(given.pop("owner"))
        prompt = tuple(range(tokens))
        request = HeadRequest(owner, key, prompt, tokens, answer, Sampling(), **given)
        self.told += self.head.submit(request, self.now)

    def step(self) -> None:
        batch = self.head.next(self.now)
        self.now += STEP_S
        self.told += self.head.expire(self.now)
        for volume in batch.volumes if batch is not None else ():
            choices = tuple(
                Choice(rows.request, rows.start + rows.count, 50)
                for rows in volume.header.rows
                if rows.sample
            )
            self.told += self.head.sampled(Sampled(volume.header.tick, choices), {}, self.now)
        for each in batch.control if batch is not None else ():
            if isinstance(each.body, Release):
                self.head.released(each.body.tick, self.now)
        self.head.validate()

    def is_admitted(self, key: str, owner: str = "d") -> bool:
        job = self.head._roster.find(owner, key)
        return job is None or job.state != "waiting"

    def rejections(self) -> dict[str, Rejected]:
        found = [each.message for each in self.told if isinstance(each.message, Rejected)]
        return {message.key: message for message in found}


def test_a_pace_counts_the_time_in_which_there_was_something_to_do() -> None:
    pace = Pace()
    pace.observe(0, 0.0, busy=True)
    assert pace.rate is None
    for second in range(1, 11):
        pace.observe(40 * second, float(second), busy=second < 10)
    assert pace.rate == pytest.approx(40, rel=0.02)
    pace.observe(400, 1000.0, busy=True)
    assert pace.rate == pytest.approx(40, rel=0.02), "nothing was to be served"
    pace.observe(400, 1030.0, busy=True)
    assert pace.rate < 20, "nothing was served"


def test_a_place_is_free_about_when_it_was_said_to_be() -> None:
    """Two run and two wait. Answers of 20 to 39 tokens at 2/s: a place is free after 4 to 15 s."""
    ring = ScriptedRing(max_running=2, max_waiting=2)
    errors, waits = [], []
    for round_ in range(24):
        for number in range(4):
            ring.submit(f"{round_}.{number}", answer=20 + 37 * (round_ * 4 + number) % 20)
        for _ in range(3 + round_ % 10):
            ring.step()
        with pytest.raises(Overloaded) as caught:
            ring.submit("more")
        asked = ring.now
        while ring.head._roster.waiting == 2:
            ring.step()
        waits.append(ring.now - asked)
        errors.append(caught.value.retry_after - waits[-1])
        while ring.head.live:
            ring.step()
    print([round(e, 1) for e in errors], [round(w, 1) for w in waits])
    # The first ones are told before any answer's length is known.
    assert max(waits) > 10
    assert max(abs(error) for error in errors[4:]) <= 3
    assert sum(errors[4:]) / len(errors[4:]) == pytest.approx(1, abs=1), "rounded up"


def test_a_request_is_refused_at_once_when_its_turn_would_come_too_late() -> None:
    ring = ScriptedRing(max_running=2)
    for number in range(14):
        ring.submit(f"r{number}", answer=20)
    while ring.head._roster.waiting > 6:
        ring.step()
    # Two of 20 tokens end every 10 s or so; 6 wait, so it's the turn of a seventh after 38 s.
    with pytest.raises(
        Overloaded, match=r"about \d+ s; it may wait for 20 s .`max_queue_time`."
    ) as told:
        ring.submit("hurried", max_queue_s=20.0)
    ring.submit("patient", max_queue_s=60.0)
    # Another client has its share: the others' requests are not all before its own.
    ring.submit("other", max_queue_s=20.0, client="other")
    at = ring.now
    while not ring.is_admitted("patient"):
        ring.step()
    assert 20 < ring.now - at < 60
    assert told.value.retry_after == pytest.approx(ring.now - at - 20, abs=8)
    assert not ring.rejections(), "who was let in has kept to its time"
    counters, _ = ring.head.stats()
    assert counters["head_late_total"] == 1


def test_who_has_waited_for_as_long_as_it_may_is_told() -> None:
    ring = ScriptedRing(max_running=1, max_queue_s=5.0)
    ring.submit("runs", answer=100)
    ring.submit("as the head has it")
    ring.submit("longer", max_queue_s=8.0)
    ring.submit("long", max_queue_s=80.0)
    while ring.now < 7:
        ring.step()
    assert list(ring.rejections()) == ["as the head has it"]
    while ring.now < 20:
        ring.step()
    told = ring.rejections()
    assert list(told) == ["as the head has it", "longer"]
    assert told["longer"].reason == "overloaded"
    assert "has not come within 8 s" in told["longer"].message
    assert told["longer"].retry_after > 1
    assert [key for _, key in ring.head.live] == ["runs", "long"]
    assert ring.head.stats()[0]["head_expired_total"] == 2
