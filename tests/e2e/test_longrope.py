"""LongRoPE through the whole product: a short prompt, a long one, and a context that is lowered."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

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
