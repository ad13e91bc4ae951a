"""The regressions go through what stages measured."""

import msgspec
import pytest

from molink.facts.profile import Profile
from molink.facts.request_costs import RequestCosts
from molink.facts.ring_times import RingTimes


def test_they_say_what_the_slowest_stage_takes() -> None:
    decode = tuple((rows, 0.01 + 0.0005 * rows) for rows in (1, 8, 64))
    prefill = tuple((rows, 0.01 + 0.0002 * rows) for rows in (16, 512))
    stage = Profile(decode=decode, prefill=prefill, prefill_token_s=1e-8)
    slow = stage.scale_by(2.0)
    costs = RequestCosts.from_times(RingTimes((stage, slow), (), 0))
    assert costs is not None
    for rows, before in ((1024, 0), (4096, 0), (8192, 0), (2048, 8192)):
        chunks = rows / 512
        expected = 2 * (chunks * (0.01 + 0.0002 * 512) + 1e-8 * rows * (before + rows / 2))
        assert costs.prefill_s(rows, before) == pytest.approx(expected, rel=0.02)
    assert costs.answer_s == pytest.approx(0.001)


def test_nothing_is_known_of_what_was_not_measured() -> None:
    assert RequestCosts.from_times(RingTimes((), (), 0)) is None
    assert RequestCosts.from_times(RingTimes((Profile(),), (), 0)) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_what_is_no_time_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="no seconds"):
        RequestCosts(0.1, wrong)
    with pytest.raises(ValueError, match=r"no seconds|Expected"):
        msgspec.msgpack.decode(msgspec.msgpack.encode([0.1, 0.0, wrong]), type=RequestCosts)
