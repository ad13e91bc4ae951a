"""A checkpoint of AWQ, served by a PC that has it and one that fetches its layers."""

from pathlib import Path

import pytest

from tests.support.low_bit_models import write_low_bit
from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.two_peers import answer_as_one_stage_does

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_peers_answer_as_one_stage_does(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel
) -> None:
    made, exact = make_model(tmp_path / "model", "llama", 3), tmp_path / "exact"
    folder = write_low_bit(made, tmp_path / "tiny-awq", exact, AWQ)
    answer_as_one_stage_does(tmp_path / "home", tools, folder, folder, exact)
