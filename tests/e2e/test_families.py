"""Models whose files name or stack tensors in ways of their own, on PCs that have none of them."""

from pathlib import Path

import pytest

from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.two_peers import answer_as_one_stage_does


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", ["mistral3", "gpt_oss"])
def test_two_peers_answer_as_one_stage_does(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel, family: str
) -> None:
    folder = make_model(tmp_path / "tiny", family, 3)
    answer_as_one_stage_does(tmp_path / "home", tools, folder, folder)
