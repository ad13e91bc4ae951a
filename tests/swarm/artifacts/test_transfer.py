"""How many bytes of a transfer are believed: those of whole shards, where these are fetched."""

import msgspec
import pytest

from molink.facts.model import ModelFacts
from molink.swarm.artifacts.transfer import (
    STALL_TIMEOUT,
    TransferDeadline,
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


@pytest.mark.parametrize(("facts", "goes_on"), [(FACTS, False), (SHARDED, True)])
def test_end_stages_need_more_bytes(facts: ModelFacts, goes_on: bool) -> None:
    most = fetched_bytes(facts, (3, 4))
    transfer = TransferDeadline(most, 0.0)
    needed = stage_bytes(FACTS, (3, 4))
    transfer.observe_bytes(needed, 10.0)
    transfer.observe_bytes(2 * needed, 20.0)
    assert (transfer.deadline == 20.0 + STALL_TIMEOUT) is goes_on
    transfer.observe_bytes(10**12, 30.0)
    transfer.observe_bytes(2 * 10**12, 40.0)
    assert transfer.deadline <= 30.0 + STALL_TIMEOUT  # not for ever


def test_sharded_models_are_bounded_by_all_files() -> None:
    assert "Start a PC that has them" in describe_missing(FACTS, [(2, 4)])
    assert describe_missing(SHARDED, [(2, 4)]) == "layers 2:4 yet: the hub has them (owner/m)"
