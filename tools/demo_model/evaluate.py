"""Held-out evaluation: perplexity against a 5-gram, sums, and wordings never trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2ForCausalLM

from tools.demo_model import arithmetic
from tools.demo_model.corpus import Conversation, all_topics, fill_answer
from tools.demo_model.network import load_network
from tools.demo_model.ngram import NGram
from tools.demo_model.tokenizer import (
    TEXT_END,
    TURN_END,
    VOCABULARY,
    encode_conversations,
    load_tokenizer,
    mark_answers,
    render_text,
    token_id,
)
from tools.demo_model.train import HELD_OUT_SIZE, select_conversations, select_refinement

#: Of topics with slots, at most this many are asked per held-out wording.
SLOTS_PER_WORDING = 6
_BATCH = 48

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Per token, over all tokens and over those the assistant wrote."""

    all_tokens: float
    answer_tokens: float


@dataclass(frozen=True, slots=True)
class Check:
    """A conversation that waits for an answer, and what that answer must contain."""

    topic: str
    messages: Conversation
    keywords: tuple[str, ...]

    def passed(self, answer: str) -> bool:
        """Whether each keyword, or one of its alternatives, occurs in the answer."""
        text = answer.lower()
        return all(
            any(option in text for option in keyword.lower().split("|"))
            for keyword in self.keywords
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What greedy decoding said, and whether it ended by itself."""

    text: str
    stopped: bool


def make_check(topic: str, text: str, *keywords: str) -> Check:
    """A check of one turn."""
    return Check(topic, ({"role": "user", "content": text},), keywords)


def network_log_probabilities(network: Qwen2ForCausalLM, texts: Sequence[Any]) -> Iterator[Floats]:
    """Natural log probability of every token but the first of each text."""
    for text in texts:
        ids = torch.from_numpy(text)[None]
        with torch.inference_mode():
            logits = network(input_ids=ids, use_cache=False).logits[0, :-1]
        found = torch.log_softmax(logits.float(), -1).gather(1, ids[0, 1:, None])
        yield found[:, 0].double().numpy()


def _compute_perplexity(scores: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]) -> Perplexity:
    all_, mask = np.concatenate(scores), np.concatenate([mask[1:] for mask in masks])
    return Perplexity(round(math.exp(-all_.mean()), 4), round(math.exp(-all_[mask].mean()), 4))


def compare_perplexity(
    network: Qwen2ForCausalLM,
    tokenizer: Tokenizer,
    train: list[Conversation],
    held: list[Conversation],
) -> tuple[Perplexity, Perplexity]:
    """Perplexity on held-out conversations of the network and of a 5-gram of the training ones."""
    pad = token_id(tokenizer, TEXT_END)
    rival = NGram(encode_conversations(tokenizer, train), VOCABULARY, pad)
    texts = encode_conversations(tokenizer, held)
    masks = [mark_answers(tokenizer, text) for text in texts]
    ours = list(network_log_probabilities(network, texts))
    return _compute_perplexity(ours, masks), _compute_perplexity(
        [rival.log_probabilities(text) for text in texts], masks
    )


def answer_greedily(
    network: Qwen2ForCausalLM, tokenizer: Tokenizer, asked: Sequence[Conversation], limit: int = 400
) -> list[Answer]:
    """The most probable answer to each conversation."""
    found: list[Answer] = []
    for first in range(0, len(asked), _BATCH):
        found += _greedy_batch(network, tokenizer, asked[first : first + _BATCH], limit)
    return found


def _greedy_batch(
    network: Qwen2ForCausalLM, tokenizer: Tokenizer, asked: Sequence[Conversation], limit: int
) -> list[Answer]:
    end, pad = token_id(tokenizer, TURN_END), token_id(tokenizer, TEXT_END)
    prompts = [tokenizer.encode(render_text(talk, ask=True)).ids for talk in asked]
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig.from_dict({"eos_token_id": end, "pad_token_id": pad})
    settings.do_sample, settings.max_new_tokens = False, limit
    network.generation_config = settings
    generate = cast(Any, network).generate  # its type asks for a narrower self
    with torch.inference_mode():
        made = generate(input_ids=ids, attention_mask=mask)
    return [
        Answer(tokenizer.decode(row[: row.index(end)] if end in row else row), end in row)
        for row in made[:, width:].tolist()
    ]


def check_sums() -> list[Check]:
    """Every sum the model should know, in one trained wording."""
    tables = {
        "add": ("What is {a} + {b}?", arithmetic.additions()),
        "subtract": ("What is {a} - {b}?", arithmetic.subtractions()),
        "multiply": ("What is {a} times {b}?", arithmetic.products()),
    }
    return [
        make_check(name, text.format(**slots), "= {c}.".format(**slots))
        for name, (text, table) in tables.items()
        for slots in table
    ]


def check_paraphrases(slots_per_wording: int = SLOTS_PER_WORDING) -> list[Check]:
    """Questions in wordings that no training conversation has."""
    rng = Random(0)
    checks = []
    for topic in all_topics():
        count = min(slots_per_wording, len(topic.slots))
        for text in topic.held_out:
            for slots in rng.sample(topic.slots, count):
                keywords = (fill_answer(keyword, slots) for keyword in topic.keywords)
                checks.append(make_check(topic.name, text.format(**slots), *keywords))
    return checks


def _score_checks(
    network: Qwen2ForCausalLM, tokenizer: Tokenizer, checks: list[Check]
) -> tuple[dict[str, Any], float]:
    answers = answer_greedily(network, tokenizer, [check.messages for check in checks])
    wrong = [
        {"question": check.messages[-1]["content"], "answer": answer.text}
        for check, answer in zip(checks, answers, strict=True)
        if not check.passed(answer.text)
    ]
    figures = {
        "asked": len(checks),
        "right": len(checks) - len(wrong),
        "accuracy": round(1 - len(wrong) / len(checks), 4),
        "wrong": wrong,
    }
    return figures, sum(answer.stopped for answer in answers) / len(answers)


def evaluate_model(folder: Path, seed: int, train_size: int) -> dict[str, Any]:
    """All figures about a trained model folder."""
    network, tokenizer = load_network(folder), load_tokenizer(folder)
    train = [*select_conversations("train", train_size, seed), *select_refinement(seed)]
    held = select_conversations("held_out", HELD_OUT_SIZE, seed)
    ours, rival = compare_perplexity(network, tokenizer, train, held)
    arithmetic_, _ = _score_checks(network, tokenizer, check_sums())
    wordings, stopped = _score_checks(network, tokenizer, check_paraphrases())
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "conversations": {"train": len(train), "held_out": len(held)},
        "perplexity": {"model": asdict(ours), "5-gram": asdict(rival)},
        "arithmetic": arithmetic_,
        "held_out_paraphrases": wordings,
        "stops_by_itself": round(stopped, 4),
    }
