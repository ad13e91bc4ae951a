"""A mixture four times as large as a stage's memory, with most experts in host memory."""

from pathlib import Path

import pytest

from molink.checkpoint.model_folder import ModelFolder
from molink.text.tokenizer import Tokenizer
from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.stage import Ring

BUDGET = 13_000_000
#: Mostly experts.
FIELDS = {"num_experts": 64, "moe_intermediate_size": 384}


def test_the_text_is_that_of_one_memory(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel
) -> None:
    folder = make_model(tmp_path / "mixture", "qwen3_moe", 3, **FIELDS)
    opened, tokenizer = ModelFolder.open(folder), Tokenizer.open(folder)
    assert sum(span.nbytes for span in opened.tensors.values()) > 4 * BUDGET
    expected = Ring(folder).generate(tokenizer.encode("Hello?"), 24, range(16))
    budgets = ["--memory", f"{BUDGET // 1_000_000}MB", "--expert-memory", "100MB"]
    options = tools.local_options("--dtype", "f32", "--coordinator-port", "0", *budgets)
    process = tools.Process(tmp_path / "home", ["up", "--model", str(folder), *options])
    try:
        process.wait_ready()
        (endpoint,) = process.found().endpoints
        with tools.client(endpoint) as client:
            answer = client.completions.create(
                model=folder.name,
                prompt="Hello?",
                temperature=0,
                max_tokens=24,
                extra_body={"ignore_eos": True},
            )
        assert answer.choices[0].text == tokenizer.decode(expected)
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("llama", "1GB", "--expert-memory is for mixtures, and model has no experts"),
        ("qwen3_moe", "lots", "expert_memory: not a size: 'lots'"),
        ("qwen3_moe", "120%", "expert_memory: a share of memory is above 0%"),
    ],
)
def test_nonsense_is_refused_in_one_line(
    tmp_path: Path,
    tools: type[Tools],
    make_model: MakeModel,
    family: str,
    asked: str,
    message: str,
) -> None:
    folder = make_model(tmp_path / "model", family, 3)
    options = tools.local_options("--coordinator-port", "0", "--expert-memory", asked)
    done = tools.run_molink(tmp_path / "home", "up", "--model", str(folder), *options)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
