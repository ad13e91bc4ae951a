"""How many bytes of a transfer are believed: those of whole shards, where these are fetched."""

import msgspec
import pytest

from molink.facts.model import ModelFacts
from molink.swarm.artifacts.transfer import STALL, Transfer, fetched_bytes, stage_bytes
from molink.swarm.controller.holdings import where_to_get

FACTS = ModelFacts(
    name="m", layers=10, layer_bytes=10**8, first_bytes=0, last_bytes=0, kv_bytes=1, context=64
)
SHARDED = msgspec.structs.replace(
    FACTS, files_bytes=10**9, hub=f"owner/m@{'0' * 40}", extra_bytes=5
)


@pytest.mark.parametrize(("facts", "goes_on"), [(FACTS, False), (SHARDED, True)])
def test_a_stage_may_need_more_than_its_layers(facts: ModelFacts, goes_on: bool) -> None:
    most = fetched_bytes(facts, (3, 4))
    transfer = Transfer(most, 0.0)
    needed = stage_bytes(FACTS, (3, 4))
    transfer.observe(needed, 10.0)
    transfer.observe(2 * needed, 20.0)
    assert (transfer.deadline == 20.0 + STALL) is goes_on
    transfer.observe(10**12, 30.0)
    transfer.observe(2 * 10**12, 40.0)
    assert transfer.deadline <= 30.0 + STALL  # not for ever


def test_who_has_what_nobody_here_has() -> None:
    assert "Start a PC that has them" in where_to_get(FACTS, [(2, 4)])
    assert where_to_get(SHARDED, [(2, 4)]) == "layers 2:4 yet: the hub has them (owner/m)"
