"""Draws from vocabularies of real models."""

from functools import partial

import torch

from molink.stage.gpu_kernels.sampling_kernels import SETTINGS, change_logits, draw_tokens


def launch_draws(vocabulary: int, masked: bool) -> None:
    masks = torch.zeros(1, -(-vocabulary // 8), dtype=torch.uint8) if masked else None
    draw_tokens(torch.empty(3, vocabulary), torch.zeros(3, SETTINGS, dtype=torch.float64), masks)


def launch_changes(count: int) -> None:
    change_logits(torch.empty(3, 32_000), torch.zeros(3, count, dtype=torch.float64))


LAUNCHES = [partial(launch_changes, 1000)] + [
    partial(launch_draws, vocabulary, masked)
    for vocabulary in (32_000, 151_936)
    for masked in (False, True)
]
