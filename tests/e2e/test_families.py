"""Models whose files name or stack tensors in ways of their own, on PCs that have none of them."""

from pathlib import Path

import pytest

from tests.support.models import MakeModel, add_draft_layer
from tests.support.processes import Tools
from tests.support.two_peers import answer_as_one_stage_does


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "family",
    ["mistral3", "gpt_oss", "granitemoe", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5"],
)
def test_two_peers_answer_as_one_stage_does(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel, family: str
) -> None:
    folder = make_model(tmp_path / "tiny", family, 3)
    if family == "glm4_moe":
        add_draft_layer(folder)
    answer_as_one_stage_does(tmp_path / "home", tools, folder, folder)
