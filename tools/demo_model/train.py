"""Training: packed rows of several lengths, Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM

from tools.demo_model.corpus import Conversation, Corpus, Split
from tools.demo_model.network import load_network, new_network, save_model
from tools.demo_model.tokenizer import (
    TEXT_END,
    encode_conversations,
    load_tokenizer,
    mark_answers,
    token_id,
    train_tokenizer,
)

#: Sizes of the two splits and of the part the tokenizer is trained on, in conversations.
TRAIN_SIZE, HELD_OUT_SIZE, TOKENIZER_SIZE = 24_000, 1_000, 8_000
#: Topics that the first training leaves weakest, with the factor of their frequency in the second.
EMPHASIS = {
    **dict.fromkeys(("day_after", "day_before", "month_after", "month_before"), 4.0),
    **dict.fromkeys(("count_to", "count_down"), 5.0),
    **dict.fromkeys(("count", "larger", "month_length"), 3.0),
    **dict.fromkeys(("half", "next_number", "my_favourite"), 2.0),
    **dict.fromkeys(("add_pc", "start", "command"), 2.0),
    **dict.fromkeys(("subtract", "unknown"), 1.5),
}
#: Conversations of the second training.
REFINE_SIZE = 8_000
#: Rows x length of a batch, and how often each is drawn: all hold the same number of tokens.
_SHAPES = ((6, 256), (3, 512), (2, 768))
_SHAPE_WEIGHTS = (14, 4, 2)
#: What the user writes is hard to predict and of less use than the answers.
_USER_WEIGHT = 0.15

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to train."""

    steps: int
    seed: int
    rate: float = 3e-3
    warmup: int = 60
    #: The share of the steps over which the rate falls.
    fall: float = 0.4
    weight_decay: float = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation as tokens, with the weight of each in the loss."""

    ids: Ids
    weights: NDArray[np.float32]


def select_conversations(
    split: Split, size: int, seed: int, emphasis: Mapping[str, float] | None = None
) -> list[Conversation]:
    """The first conversations of a split; no conversation of one occurs in the other."""
    found = Corpus(seed, emphasis).conversations(split)
    if split == "train":
        return list(islice(found, size))
    # Short ones are often drawn again: each should count once.
    unique = {repr(talk): talk for talk in islice(found, size)}
    return list(unique.values())


def make_samples(tokenizer: Tokenizer, talks: Sequence[Conversation]) -> list[Sample]:
    """Conversations as tokens, each closed with the end-of-text mark."""
    end = np.array([token_id(tokenizer, TEXT_END)], dtype=np.int64)
    found = []
    for ids in encode_conversations(tokenizer, talks):
        weights = np.where(mark_answers(tokenizer, ids), 1.0, _USER_WEIGHT)
        weights = np.append(weights, _USER_WEIGHT).astype(np.float32)
        found.append(Sample(np.concatenate([ids, end]), weights))
    return found


def make_batches(pool: Sequence[Sample], seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of token ids and weights, both [rows, length + 1].

    Every row begins where a conversation does, as it will when the model is used.
    """
    rng = Random(seed)
    order = list(range(len(pool)))
    rng.shuffle(order)
    stream = chain.from_iterable(repeat(order))
    while True:
        count, length = rng.choices(_SHAPES, _SHAPE_WEIGHTS)[0]
        rows = [_make_row(pool, stream, length + 1) for _ in range(count)]
        ids = torch.from_numpy(np.stack([row.ids for row in rows]))
        yield ids, torch.from_numpy(np.stack([row.weights for row in rows]))


def _make_row(pool: Sequence[Sample], stream: Iterator[int], length: int) -> Sample:
    parts: list[Sample] = []
    while sum(len(part.ids) for part in parts) < length:
        parts.append(pool[next(stream)])
    return Sample(
        np.concatenate([part.ids for part in parts])[:length],
        np.concatenate([part.weights for part in parts])[:length],
    )


def make_optimizers(network: torch.nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in network.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices,
            lr=plan.rate,
            weight_decay=plan.weight_decay,
            ns_steps=4,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def _compute_rate(step: int, plan: Plan) -> float:
    """Warm up, stay, then fall linearly to nearly nothing over the last part."""
    falling = plan.fall * plan.steps
    left = (plan.steps - step) / max(1.0, falling)
    return plan.rate * min((step + 1) / plan.warmup, max(left, 0.01), 1.0)


def set_rate(optimizers: Sequence[torch.optim.Optimizer], step: int, plan: Plan) -> None:
    """Set the rate of a step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = _compute_rate(step, plan)


def _compute_loss(
    network: torch.nn.Module, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(input_ids=ids[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    wanted = weights[:, 1:].flatten()
    return (losses * wanted).sum() / wanted.sum()


def train_network(network: Qwen2ForCausalLM, pool: Sequence[Sample], plan: Plan) -> None:
    """Train in place; progress goes to stderr as JSON lines."""
    network.train()
    optimizers = make_optimizers(network, plan)
    started, recent = time.monotonic(), 0.0
    for step, (ids, weights) in enumerate(islice(make_batches(pool, plan.seed), plan.steps)):
        set_rate(optimizers, step, plan)
        loss = _compute_loss(network, ids, weights)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent = loss.item() if step == 0 else 0.95 * recent + 0.05 * loss.item()
        if step % 25 == 0 or step == plan.steps - 1:
            line = {
                "step": step,
                "loss": round(recent, 4),
                "seconds": round(time.monotonic() - started, 1),
            }
            print(json.dumps(line), file=sys.stderr, flush=True)


def train_model(folder: Path, plan: Plan, train_size: int = TRAIN_SIZE) -> None:
    """Train tokenizer and network from nothing and write the model folder."""
    torch.manual_seed(plan.seed)
    torch.use_deterministic_algorithms(True)
    talks = select_conversations("train", train_size, plan.seed)
    tokenizer = train_tokenizer(talks[:TOKENIZER_SIZE])
    pool = make_samples(tokenizer, talks)
    tokens = sum(len(sample.ids) for sample in pool)
    print(json.dumps({"conversations": len(pool), "tokens": tokens}), file=sys.stderr, flush=True)
    network = new_network()
    train_network(network, pool, plan)
    save_model(network, tokenizer, folder)


def select_refinement(seed: int) -> list[Conversation]:
    """The conversations of the second training."""
    return select_conversations("train", REFINE_SIZE, seed + 1, EMPHASIS)


def refine_model(folder: Path, plan: Plan) -> None:
    """Continue the training of a model folder with more of its weakest topics, and rewrite it."""
    torch.manual_seed(plan.seed)
    torch.use_deterministic_algorithms(True)
    tokenizer, network = load_tokenizer(folder), load_network(folder)
    train_network(network, make_samples(tokenizer, select_refinement(plan.seed)), plan)
    save_model(network, tokenizer, folder)
