"""Models with unusual tensor names and stacks, on PCs that fetch their layers from another."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from molink.text.tokenizer import Tokenizer
from tests.support.models import MakeModel, add_draft_layer
from tests.support.processes import Tools
from tests.support.stage import Ring
from tests.support.two_peers import answer_as_one_stage_does

STREAMS, ANSWER = 5, 240
#: Chunks, chosen positions, and two kinds of heads.
NEWER = ("llama4_text", "glm_moe_dsa", "gemma4_text")
#: Families with recurrent layers.
STATES = ("qwen3_next", "qwen3_5", "lfm2_moe", "granitemoehybrid", "kimi_linear")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "family",
    ["mistral3", "gpt_oss", "granitemoe", "glm4_moe", "glm4_moe_lite", *NEWER, *STATES],
)
def test_two_peers_answer_as_one_stage_does(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel, family: str
) -> None:
    folder = make_model(tmp_path / "tiny", family, 3)
    if family == "glm4_moe":
        add_draft_layer(folder)
    answer_as_one_stage_does(tmp_path / "home", tools, folder, folder)


# Without processes: tests/molinkd/worker/test_states.py and test_speculation.py.
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["qwen3_next", "mimo"])
def test_states_are_computed_again_after_a_worker_was_killed(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel, family: str
) -> None:
    folder = make_model(tmp_path / "tiny", family, 3)
    prompts = [f"{number} foxes of the forest " * (number + 1) for number in range(STREAMS)]
    tokenizer, ring = Tokenizer.open(folder), Ring(folder)
    expected = [
        tokenizer.decode(ring.generate(tokenizer.encode(prompt), ANSWER, range(64)))
        for prompt in prompts
    ]
    with tools.two_pcs(tmp_path / "pcs", folder, ("--coordinator-port", "0"), {}) as first:
        (endpoint,) = first.found().endpoints
        with tools.client(endpoint) as client, ThreadPoolExecutor(STREAMS) as pool:
            model = str(client.models.list().data[0].id)

            received = Counter[str]()

            def ask(prompt: str) -> str:
                text = ""
                for part in client.completions.create(
                    model=model,
                    prompt=prompt,
                    temperature=0,
                    max_tokens=ANSWER,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    text += part.choices[0].text
                    received[prompt] += 1
                return text

            assert list(pool.map(ask, prompts)) == expected
            for stage in (1, 0):
                status = first.wait_ready()
                peer = status["pipelines"][0]["stages"][stage]["peer"]
                (found,) = (each for each in status["peers"] if each["id"] == peer)
                received.clear()
                asked = [pool.submit(ask, prompt) for prompt in prompts]
                tools.wait_for(lambda: len(received) == STREAMS, first, every=0.01)
                assert not any(each.done() for each in asked)
                psutil.Process(found["workers"][0]["pid"]).kill()
                assert [each.result() for each in asked] == expected, stage

            def count_cached() -> int:
                answer = client.completions.create(
                    model=model, prompt="foxes of the forest " * 20, temperature=0, max_tokens=8
                )
                texts.append(answer.choices[0].text)
                return answer.usage.prompt_tokens_details.cached_tokens

            texts = list[str]()
            assert count_cached() == 0 < count_cached()
            assert texts[0] == texts[1]
