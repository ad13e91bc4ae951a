"""What packing makes of rows, beside what their exponents' entropy allows."""

from pathlib import Path

import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.link.packing.compression import RowCodec
from tests.support.models import MakeModel
from tools.measure_real_rows import CutModel, collect, figures, ideal, ratio


def test_a_ratio_is_below_the_ideal_one() -> None:
    rows = torch.randn(64, 512).bfloat16()
    best = ideal([rows])
    assert 1.4 < best < 1.6
    assert 0.97 * best < ratio(RowCodec(), [rows]) < best
    # All exponents the same: nothing but sign and mantissa is left.
    assert ideal([torch.full((4, 8), 1.5).bfloat16()]) == 2.0


def test_rows_of_all_cuts(make_model: MakeModel, tmp_path: Path) -> None:
    folder = ModelFolder.open(make_model(tmp_path / "tiny", "llama", 3))
    texts = [list(range(10, 34)), list(range(40, 64))]
    model = CutModel(folder, [1, 2], 32)
    chunks, decodes = collect(model, texts, prompt=24, chunk=16, answer=4)
    assert [[len(one) for one in cut] for cut in chunks] == [[16, 8, 16, 8]] * 2
    assert [[tuple(one.shape) for one in cut] for cut in decodes] == [[(4, 64), (4, 64)]] * 2
    assert not torch.equal(chunks[0][0], chunks[1][0])
    assert [row["cut"] for row in figures([1, 2], chunks, decodes)] == [1, 2]
