"""Greedy text of a whole model on this CPU, token by token, without a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import Quantize
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage

_BLOCK = 16


def whole_model(
    folder: ModelFolder, room: int, dtype: DTypeChoice, quantize: Quantize = "none"
) -> Stage:
    """All layers of a model in one stage, with room for the KV of ``room`` tokens."""
    stage = Stage.load_layers(folder, (0, folder.config.layers), "cpu", dtype, quantize=quantize)
    stage.allocate_kv_pool(-(-room // _BLOCK), _BLOCK)
    return stage


def next_logits(stage: Stage, tokens: Sequence[int], start: int) -> Tensor:
    """Logits ``[V]`` after ``tokens``, of which those before ``start`` were computed before."""
    rows = torch.tensor(tokens[start:])
    blocks = range(-(-len(tokens) // _BLOCK))
    sequence = SequenceRows(start, len(rows), blocks)
    return stage.forward(StageInput(rows, None, (sequence,), (len(rows) - 1,)))[0]


def greedy(
    stage: Stage, prompt: Sequence[int], count: int, ends: Collection[int]
) -> list[tuple[int, Tensor]]:
    """Up to ``count`` tokens after a prompt, the first of ``ends`` the last, and their logits."""
    tokens, start, found = list(prompt), 0, list[tuple[int, Tensor]]()
    while len(found) < count and not (found and found[-1][0] in ends):
        logits = next_logits(stage, tokens, start)
        start = len(tokens)
        tokens.append(int(logits.argmax()))
        found.append((tokens[-1], logits))
    return found
