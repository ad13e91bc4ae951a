"""A real model from its GGUF file, over three PCs of which two join by a token."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import Process, Tools
from tools.fetch_smollm2 import fetch

MESSAGES = [{"role": "user", "content": "Write three sentences about the sea."}]


def answer(process: Process, tools: type[Tools]) -> str:
    with tools.client(process.found().endpoints[0]) as client:
        (model,) = client.models.list().data
        found = client.chat.completions.create(
            model=model.id, messages=MESSAGES, temperature=0, max_tokens=100
        )
    return found.choices[0].message.content or ""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["f32", "auto"])
def test_three_pcs_answer_as_one_does(tmp_path: Path, tools: type[Tools], dtype: str) -> None:
    path = fetch(tmp_path)
    local = tools.local_options()
    up = ["up", "--model", str(path), "--dtype", dtype, "--coordinator-port", "0", *local]
    alone = tools.Process(tmp_path / "alone", up)
    try:
        alone.wait_ready()
        expected = answer(alone, tools)
    finally:
        alone.stop()
    assert "sea" in expected
    with ExitStack() as stack:
        first = tools.Process(tmp_path / "first", [*up, "--min-peers", "3"])
        stack.callback(first.stop)
        tools.wait_for(first.found().home.membership.exists, first)
        token = tools.run_molink(tmp_path / "first", "invite", "--uses", "2").stdout.strip()
        joined = []
        for name in ("second", "third"):
            home = tmp_path / name
            home.mkdir()
            (home / "config.toml").write_text("replicate_models = false\n", encoding="utf-8")
            joined.append(tools.Process(home, ["join", token, "--name", name, *local]))
            stack.callback(joined[-1].stop)
        for process in (first, *joined):
            status = process.wait_ready()
            assert len(status["pipelines"][0]["stages"]) == 3
            assert answer(process, tools) == expected
        for process in joined:
            # Only the blocks of its own layers, and the tokenizer.
            fetched = sum(
                file.stat().st_size for file in process.home.models.rglob("*") if file.is_file()
            )
            assert fetched < 0.9 * path.stat().st_size
