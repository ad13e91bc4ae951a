"""Models whose files name or stack tensors in ways of their own, on PCs that have none of them."""

from pathlib import Path

import pytest

from molink.text.tokenizer import Tokenizer
from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.stage import Ring

TOKENS = 24


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", ["mistral3", "gpt_oss"])
def test_two_peers_answer_as_one_stage_does(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel, family: str
) -> None:
    folder = make_model(tmp_path / "tiny", family, 3)
    tokenizer = Tokenizer.open(folder)
    messages = [{"role": "user", "content": "Hello?"}]
    assert tokenizer.template is not None
    prompt = tokenizer.encode(tokenizer.template.render(messages), special=False)
    expected = Ring(folder).generate(prompt, TOKENS, range(16))
    options = ["--model", str(folder), "--peers", "2", "--dtype", "f32"]
    process = tools.Process(tmp_path / "home", ["demo", *options])
    try:
        status = process.wait_ready()
        assert len(status["pipelines"][0]["stages"]) == 2
        with tools.client(process.found().endpoints[0]) as client:
            answer = client.chat.completions.create(
                model="tiny",
                messages=messages,
                temperature=0,
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
        assert answer.choices[0].message.content == tokenizer.decode(expected)
    finally:
        process.stop()
