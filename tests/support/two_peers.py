"""A model served by a PC that has it and one that fetches its layers, beside one stage."""

from pathlib import Path

from molink.text.tokenizer import Tokenizer
from tests.support.processes import Tools
from tests.support.stage import Ring

TOKENS = 24


def answer_as_one_stage_does(
    home: Path, tools: type[Tools], model: Path, folder: Path, exact: Path | None = None
) -> str:
    """Check the greedy text of two peers that serve ``model``; returns what they call it.

    ``folder`` has the tokenizer, and what one stage loads, unless ``exact`` has its weights.
    """
    tokenizer = Tokenizer.open(folder)
    messages = [{"role": "user", "content": "Hello?"}]
    assert tokenizer.chat_template is not None
    prompt = tokenizer.encode(tokenizer.chat_template.render_prompt(messages), special=False)
    expected = Ring(exact or folder).generate(prompt, TOKENS, range(16))
    options = ["--model", str(model), "--peers", "2", "--dtype", "f32"]
    process = tools.Process(home, ["demo", *options])
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
        return str(status["model"])
    finally:
        process.stop()
