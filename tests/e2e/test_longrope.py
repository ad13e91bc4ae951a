"""LongRoPE end to end: a short prompt, a long one, and a lowered context length."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from openai import BadRequestError

from tests.molinkd.worker.test_longrope import PHI3, prompt
from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.stage import Reference

TOKENS = 16


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_short_and_long_prompts_over_two_peers(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel
) -> None:
    folder = make_model(tmp_path / "tiny-128k", "phi3", 5, **PHI3)
    reference = Reference(folder)
    process = tools.Process(
        tmp_path / "home", ["demo", "--model", str(folder), "--peers", "2", "--dtype", "f32"]
    )
    try:
        status = process.wait_ready()
        assert len(status["pipelines"][0]["stages"]) == 2
        with tools.client(process.found().endpoints[0]) as client:

            def likely(ids: Sequence[int]) -> list[float]:
                answer = client.completions.create(
                    model=status["model"],
                    prompt=list(ids),
                    temperature=0,
                    max_tokens=TOKENS,
                    logprobs=1,
                    extra_body={"ignore_eos": True},
                )
                found = answer.choices[0].logprobs
                assert found is not None
                return list(found.token_logprobs or ())

            for count in (4200, 40):
                ids = prompt(count)
                greedy = reference.generate(ids, TOKENS)
                logits = reference.logits([*ids, *greedy[:-1]])[count - 1 :]
                expected = logits.log_softmax(-1).max(-1).values
                torch.testing.assert_close(torch.tensor(likely(ids)), expected, atol=1e-3, rtol=0)
    finally:
        process.stop()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("context", [None, 4096])
def test_a_context_that_is_lowered(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel, context: int | None
) -> None:
    """A possibly long answer uses the long factors, unless ``--max-model-len`` bounds it."""
    folder = make_model(tmp_path / "tiny-128k", "phi3", 5, **PHI3)
    reference, ids = Reference(folder), prompt(40)
    short, long = (
        reference.logits(tokens)[39].log_softmax(-1).max(-1).values
        for tokens in (ids, [*ids, *[0] * 4057])
    )
    assert abs(short - long) > 0.01
    lowered = () if context is None else ("--max-model-len", str(context))
    process = tools.Process(
        tmp_path / "home",
        ["up", "--model", str(folder), "--dtype", "f32", *lowered, *tools.local_options()],
    )
    try:
        name = process.wait_ready()["model"]
        with tools.client(process.found().endpoints[0]) as client:

            def ask(tokens: Sequence[int]) -> float:
                """Logprob of the first token of an answer without a token limit."""
                with client.completions.create(
                    model=name,
                    prompt=list(tokens),
                    temperature=0,
                    max_tokens=8192,
                    logprobs=1,
                    extra_body={"ignore_eos": True},
                    stream=True,
                ) as chunks:
                    found = next(chunk.choices[0].logprobs for chunk in chunks if chunk.choices)
                return found.token_logprobs[0]

            expected = long if context is None else short
            assert ask(ids) == pytest.approx(float(expected), abs=1e-3)
            if context is None:
                ask(prompt(4096))
            else:
                with pytest.raises(BadRequestError, match=r"context of .* \(4096 tokens"):
                    ask(prompt(4096))
    finally:
        process.stop()
