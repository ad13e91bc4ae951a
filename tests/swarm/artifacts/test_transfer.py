import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.model import ModelFacts
from molink.swarm.artifacts.transfer import (
    RATE_WINDOW,
    STALL_TIMEOUT,
    TransferDeadline,
    TransferRate,
    estimate_eta,
    fetched_bytes,
    stage_bytes,
)
from molink.swarm.controller.holdings import describe_missing

FACTS = ModelFacts(
    name="m",
    layers=10,
    layer_bytes=10**8,
    first_bytes=0,
    last_bytes=0,
    kv_bytes=1,
    max_model_len=64,
)
SHARDED = msgspec.structs.replace(
    FACTS, files_bytes=10**9, hub=f"owner/m@{'0' * 40}", extra_bytes=5
)


@pytest.mark.parametrize(("facts", "has_progress"), [(FACTS, False), (SHARDED, True)])
def test_deadline_is_bounded_by_the_maximum_bytes(facts: ModelFacts, has_progress: bool) -> None:
    most = fetched_bytes(facts, (3, 4))
    transfer = TransferDeadline(most, 0.0)
    needed = stage_bytes(FACTS, (3, 4))
    transfer.observe_bytes(needed, 10.0)
    transfer.observe_bytes(2 * needed, 20.0)
    assert (transfer.deadline == 20.0 + STALL_TIMEOUT) is has_progress
    transfer.observe_bytes(10**12, 30.0)
    transfer.observe_bytes(2 * 10**12, 40.0)
    assert transfer.deadline <= 30.0 + STALL_TIMEOUT


def test_missing_layers_come_with_a_remedy() -> None:
    assert "Start a PC that has them" in describe_missing(FACTS, [(2, 4)])
    assert describe_missing(SHARDED, [(2, 4)]) == "layers 3-4 yet: the hub has them (owner/m)"


def test_rate_covers_the_window() -> None:
    speed = TransferRate(0.0)
    assert speed.rate == 0.0
    for second in range(1, 31):
        speed.observe_bytes(second * 100, float(second))
    assert speed.rate == 100.0
    for second in range(31, 41):
        speed.observe_bytes(3000, float(second))
    assert speed.rate == 0.0


def test_restarted_transfer_resets_the_rate() -> None:
    speed = TransferRate(0.0)
    speed.observe_bytes(1000, 1.0)
    speed.observe_bytes(10, 2.0)
    assert speed.rate == 0.0
    speed.observe_bytes(20, 3.0)
    assert speed.rate == 10.0


def test_eta() -> None:
    assert estimate_eta(100, 50.0) == 2.0
    assert estimate_eta(100, 0.0) is None


@given(st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(0, 10**9)), max_size=200))
def test_samples_are_bounded_and_rate_is_never_negative(
    samples: list[tuple[float, int]],
) -> None:
    speed, now, done = TransferRate(0.0), 0.0, 0
    for seconds, more in samples:
        now, done = now + seconds, done + more
        speed.observe_bytes(done, now)
        assert speed.rate >= 0.0
        assert len(speed._seen) <= 2 * RATE_WINDOW / 0.25 + 3
