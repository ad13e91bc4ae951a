"""How much memory a stage's KV pool gets."""

from types import SimpleNamespace

import pytest

from molink.peer.assignments import kv_budget
from molink.peer.device import Measured
from molink.swarm.partition import Costs
from molink.swarm.placement import MARGIN
from molink.wire.control import Assign, Device, ModelFacts

FACTS = ModelFacts(
    name="m", layers=4, layer_bytes=1000, first_bytes=0, last_bytes=0, kv_bytes=1, context=4096
)
ASSIGN = Assign(
    pipeline="p1", epoch=1, stage=0, stages=1, layers=(0, 4), model="m", sources=(), dtype="auto"
)
FOLDER = SimpleNamespace(config=SimpleNamespace(dtype="bf16"), facts=lambda _: FACTS)


@pytest.mark.parametrize(("bf16", "wider"), [(True, 1), (False, 2)])
def test_the_pool_leaves_what_placement_leaves(bf16: bool, wider: int) -> None:
    def budget(memory: int) -> int:
        device = Device(kind="cpu", name="x", memory=memory, bf16=bf16)
        return kv_budget(FOLDER, ASSIGN, Measured(device, bf16), 10)  # type: ignore[arg-type]

    # The least that placement puts here has room for the KV that placement counts with.
    costs = Costs.of(FACTS)
    least = -(-costs.memory(4, opens=True, closes=True) * wider // (1 - MARGIN))
    assert 0 <= budget(int(least) + 1) - 4 * costs.layer_kv * wider < 3
    assert budget(100_000) + 4000 * wider <= 100_000 * (1 - MARGIN)
    assert budget(10**9) == 4 * 4096 * 10 * wider
    assert budget(10) == 0
