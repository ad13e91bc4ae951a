"""A GGUF file as people bring it: served by PCs that have nothing of it, from its own template."""

import threading
from pathlib import Path

import pytest

from molink.checkpoint.source import Uncounted
from molink.checkpoint.unpacking import unpacked
from molink.text.tokenizer import Tokenizer
from tests.support.gguf_models import Kind, write_gguf
from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.stage import Ring

TOKENS = 24


@pytest.mark.timeout(240)
def test_two_peers_answer_as_one_stage_does(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel
) -> None:
    path = write_gguf(make_model(tmp_path / "model", "llama", 3), tmp_path / "t.gguf", Kind.Q4_0)
    made = unpacked(path, tmp_path / "here", Uncounted(), threading.Event())
    tokenizer = Tokenizer.open(made)
    messages = [{"role": "user", "content": "Hello?"}]
    assert tokenizer.template is not None
    prompt = tokenizer.encode(tokenizer.template.render(messages), special=False)
    expected = Ring(made).generate(prompt, TOKENS, range(16))
    options = ["--model", str(path), "--peers", "2", "--dtype", "f32"]
    process = tools.Process(tmp_path / "home", ["demo", *options])
    try:
        status = process.wait_ready()
        assert status["model"] == "t"
        assert len(status["pipelines"][0]["stages"]) == 2
        with tools.client(process.found().endpoints[0]) as client:
            answer = client.chat.completions.create(
                model="t",
                messages=messages,
                temperature=0,
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
        text = tokenizer.decode(expected)
        assert answer.choices[0].message.content == text
    finally:
        process.stop()
