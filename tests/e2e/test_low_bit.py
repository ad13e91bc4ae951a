"""A checkpoint of AWQ, served by a PC that has it and one that fetches its layers."""

from pathlib import Path

import pytest

from molink.text.tokenizer import Tokenizer
from tests.support.low_bit_models import write_low_bit
from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.stage import Ring

TOKENS = 24
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_peers_answer_as_one_stage_does(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel
) -> None:
    made = make_model(tmp_path / "model", "llama", 3)
    folder = write_low_bit(made, tmp_path / "tiny-awq", tmp_path / "exact", AWQ)
    tokenizer = Tokenizer.open(folder)
    messages = [{"role": "user", "content": "Hello?"}]
    assert tokenizer.template is not None
    prompt = tokenizer.encode(tokenizer.template.render(messages), special=False)
    expected = Ring(tmp_path / "exact").generate(prompt, TOKENS, range(16))
    options = ["--model", str(folder), "--peers", "2", "--dtype", "f32"]
    process = tools.Process(tmp_path / "home", ["demo", *options])
    try:
        status = process.wait_ready()
        assert len(status["pipelines"][0]["stages"]) == 2
        with tools.client(process.found().endpoints[0]) as client:
            answer = client.chat.completions.create(
                model=status["model"],
                messages=messages,
                temperature=0,
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
        assert answer.choices[0].message.content == tokenizer.decode(expected)
    finally:
        process.stop()
