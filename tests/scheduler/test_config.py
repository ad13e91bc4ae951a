import pytest

from molink.errors import UsageError
from molink.scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
    "changes", [{"blocks": 0}, {"micro_batches": 65}, {"max_num_batched_tokens": -1}]
)
def test_out_of_range_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        SchedulerConfig(**{"blocks": 4, "block_size": 4, "micro_batches": 2, **changes})


def test_blocks_for() -> None:
    config = SchedulerConfig(4, 16, 1)
    assert [config.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
