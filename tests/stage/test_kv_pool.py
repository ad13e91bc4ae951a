import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.stage.kv_pool import KVPool
from tests.support.models import MakeModel


def test_a_copy_begins_as_its_source_in_all_layers_and_is_zero_beyond(
    make_model: MakeModel, tmp_path: Path
) -> None:
    config = ModelFolder.open(make_model(tmp_path)).config
    pool = KVPool(config, 2, 4, 8, torch.float32, torch.device("cpu"))
    rows = torch.rand(2, 32, 2, config.kv_heads, config.head_dim)
    rows[:, 8 + 3 : 16] = torch.nan
    rows[:, 16:24] = torch.nan
    for layer in range(2):
        pool.write_rows(layer, torch.arange(32), rows[layer])
    pool.copy_block(1, 2, 3)
    for layer in range(2):
        kept = rows[layer].clone()
        kept[16:19] = kept[8:11]
        kept[19:24] = 0
        keys, values = pool.read_blocks(layer, torch.arange(4), 1)
        expected = kept.permute(1, 2, 0, 3)
        torch.testing.assert_close(keys[0], expected[0], equal_nan=True)
        torch.testing.assert_close(values[0], expected[1], equal_nan=True)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have small pages anyway")
def test_a_pool_takes_memory_in_small_pages_only() -> None:
    shape = SimpleNamespace(kv_heads=2, head_dim=64, kv_kinds=2)
    pool = KVPool(shape, 2, 4096, 16, torch.bfloat16, torch.device("cpu"))
    address = pool.layer_pages(0)[0].data_ptr()
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, _, rest = line.partition("-")
        if rest and " " in rest and all(each in "0123456789abcdef" for each in first):
            inside = int(first, 16) <= address < int(rest.split()[0], 16)
        elif inside and line.startswith("VmFlags:"):
            assert "nh" in line.split()
            return
    pytest.fail("the pool is nowhere in this process's memory")
