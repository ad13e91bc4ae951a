"""Greedy fp32 answers of three processes equal those of ``transformers``."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from molink.checkpoint.model_source import find_demo_model

PROMPTS = [
    "What is molink?",
    "How do I add a PC?",
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "What is 7 plus 5?",
    "What is 12 minus 4?",
    "Count from 1 to 30.",
    "Tell me a story about a swarm.",
    "Explain how molink works in detail.",
    "What is a stage?",
    "What does the head do?",
    "What happens when a PC dies?",
    "How many legs does a spider have?",
    "What is the opposite of hot?",
    "Name the days of the week.",
    "Is molink private?",
    "Why does decode go first?",
    "thanks, bye",
    "asdf qwer zxcv 1234 !?",
]
TOKENS = 48


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The answers of ``transformers``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = find_demo_model().path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        made = output[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(made, skip_special_tokens=True))
    torch.set_num_threads(threads)
    return answers


def ask(client: Any, prompt: str) -> str:
    answer = client.chat.completions.create(
        model="molink-demo",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=TOKENS,
    )
    return answer.choices[0].message.content


def test_one_after_another(demo: Any, tools: Any, expected: list[str]) -> None:
    client = tools.client(demo.found().endpoints[0])
    assert [ask(client, prompt) for prompt in PROMPTS] == expected


def test_sixteen_at_once(demo: Any, tools: Any, expected: list[str]) -> None:
    clients = [tools.client(endpoint) for endpoint in demo.found().endpoints]
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda item: ask(clients[item[0] % 3], item[1]), enumerate(PROMPTS))
        )
    assert answers == expected
