"""Chooses who draws tokens: a compiled kernel, if it draws as torch does on the CPU."""

import logging
import math
from collections.abc import Collection
from functools import cache

import torch

from molink.stage.gpu_kernels.triton_support import find_triton_problem
from molink.stage.sampling.compiled_draws import DrawRows, draw_rows
from molink.stage.sampling.sampler import SampleRow, sample_tokens
from molink.stage.sampling.token_history import TokenHistory
from molink.wire.messages.data_plane import SamplingParams

log = logging.getLogger(__name__)

#: Share of tokens that may differ from torch's, since sums are rounded in another order.
DRAWS_TOLERANCE = 0.02
_VOCABULARY, _POSITIONS = 4400, 4
_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=20, top_p=0.8),
    SamplingParams(top_k=5000, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=3.0, top_p=0.999, min_p=0.001),
)
_HISTORY = TokenHistory(range(0, _VOCABULARY, 50), (7, 8, 8))
#: Allows half of all tokens.
_MASK = b"\x5a" * (_VOCABULARY // 8)


def create_draws(device: torch.device, disabled_kernels: Collection[str] = ()) -> DrawRows | None:
    """Return the compiled draw, or ``None`` if torch must draw on ``device``."""
    allowed = device.type == "cuda" and "compiled-sampling" not in disabled_kernels
    return draw_rows if allowed and _check_draws(device) else None


def draws_error(device: torch.device) -> float:
    """Return the share of rows whose token differs from torch's on the CPU."""
    rows = [
        SampleRow(params, position, _HISTORY, _MASK if position % 3 == 0 else None)
        for position in range(_POSITIONS)
        for params in _PARAMS
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(rows), _VOCABULARY, generator=generator).mul_(3)
    logits[1, 7] = math.nan
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where Triton launches kernels
    drawn = draw_rows(logits.to(device), rows).tolist()
    found = [token if usable == 1 else -1 for token, usable in drawn]
    exact = [-1 if one is None else one.token for one in sample_tokens(logits, rows)]
    return sum(map(int.__ne__, found, exact)) / len(rows)


@cache
@torch.inference_mode()
def _check_draws(device: torch.device) -> bool:
    """Check the kernel in this process; benchmarks run no other check."""
    if find_triton_problem():
        return False
    try:
        error = draws_error(device)
    except Exception as failure:  # compilers and kernels may raise anything
        log.warning("no compiled sampling on %s: %s", device, failure)
        return False
    if error > DRAWS_TOLERANCE:
        log.warning("no compiled sampling on %s: %.0f %% of tokens differ", device, 100 * error)
    return error <= DRAWS_TOLERANCE
