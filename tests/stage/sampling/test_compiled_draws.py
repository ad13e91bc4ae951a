"""The compiled draw gives the tokens of the plain formula, in one launch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from molink.stage.gpu_kernels import sampling_kernels
from molink.stage.sampling import create
from molink.stage.sampling.compiled_draws import draw_rows
from molink.stage.sampling.sampler import SampleRow, sample_tokens
from molink.stage.sampling.token_draws import uniform_noise
from molink.stage.sampling.token_history import TokenHistory
from molink.wire.messages.data_plane import MAX_TEMPERATURE, SamplingParams
from tests.support.launch_counter import LaunchCounter
from tests.support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton

#: Larger than two blocks of the kernel, and no multiple of anything.
VOCABULARY = 4363
GREEDY = SamplingParams(temperature=0.0)
TOP_P = SamplingParams(temperature=0.7, top_p=0.9, seed=1)
#: Error of the kernel's sums, relative to them.
ROUNDING = 1e-5


def logits_of(rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    noise = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return noise.mul_(scale)


def mask_of(allowed: Sequence[int]) -> bytes:
    bits = np.zeros(VOCABULARY, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def plain_formula(logits: Tensor, row: SampleRow, share: float, noise: float) -> int:
    """The filters by sorting in float64, then the inverse cumulative sum.

    Tokens as likely as the last one kept stay.
    """
    params, logits = row.sampling_params, logits.double()
    if row.allowed is not None:
        bits = np.unpackbits(np.frombuffer(row.allowed, np.uint8), bitorder="little")
        logits = logits.where(torch.from_numpy(bits[: len(logits)] > 0), -math.inf)
    weights = ((logits - logits.max()) / params.temperature).exp()
    if params.top_k:
        weights[weights < weights.sort(descending=True).values[: params.top_k][-1]] = 0
    ordered = weights.sort(descending=True).values
    inside = (ordered.cumsum(0) - ordered < share * ordered.sum()) | (params.top_p >= 1)
    # In float32, as logits are.
    floor = (1 - 1e-9) * max(ordered[inside][-1], params.min_p)
    weights[weights < floor] = 0
    cumulative = weights.cumsum(0)
    return int((cumulative <= cumulative[-1] * noise).sum())


def possible_tokens(logits: Tensor, row: SampleRow) -> set[int]:
    """Tokens for a row's noise, which may differ where sums are rounded otherwise."""
    noise, top_p = uniform_noise(row.sampling_params.seed, row.position), row.sampling_params.top_p
    bends = (1 - ROUNDING, 1.0, 1 + ROUNDING)
    return {
        plain_formula(logits, row, top_p * share, min(noise * bend, 1 - 1e-12))
        for share in bends
        for bend in bends
    }


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    """The tokens that the kernel draws; ``None`` for rows that can't be used."""
    found = draw_rows(logits.to(DEVICE), rows).tolist()
    return [token if usable else None for token, usable in found]


@settings(max_examples=8)
@given(
    temperature=st.sampled_from((1e-3, 0.6, 1.0, 3.0)),
    top_k=st.sampled_from((0, 0, 1, 20, 2047, 2048, 4000, 2**31 - 1)),
    top_p=st.sampled_from((1.0, 0.99999, 0.95, 0.6, 1e-6)),
    min_p=st.sampled_from((0.0, 0.0, 1e-9, 0.05, 1.0)),
    step=st.sampled_from((0.0, 0.125)),
    scale=st.sampled_from((0.1, 3.0)),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tokens_are_those_of_the_plain_formula(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    step: float,
    scale: float,
    masked: bool,
    seed: int,
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    logits = logits_of(2, seed, scale)
    if step:  # with many ties, as in bf16 logits
        logits = (logits / step).round() * step
    allowed = mask_of(range(seed % 7, VOCABULARY, 3)) if masked else None
    rows = [SampleRow(params, 3, allowed=allowed), SampleRow(params, 4)]
    for index, token in enumerate(draw(logits, rows)):
        assert token in possible_tokens(logits[index], rows[index])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 5e-324},
        {"temperature": MAX_TEMPERATURE, "top_p": 0.5},
        {"top_p": 5e-324},
        {"top_p": 1 - 2**-53},
        {"min_p": 5e-324},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extremes_give_the_tokens_of_torch(params: dict[str, float], scale: float) -> None:
    rows = [SampleRow(SamplingParams(seed=5, **params), 2**53)]
    logits = logits_of(1, scale=scale)
    (expected,) = sample_tokens(logits, rows)
    assert expected is not None
    assert draw(logits, rows) == [expected.token]


def test_greedy_rows_and_rows_without_tokens() -> None:
    logits = logits_of(8)
    logits[0, [9, 2 * 2048 + 3]] = 50.0  # a tie of two blocks
    for row, value in ((1, math.nan), (2, math.inf), (3, -math.inf)):
        logits[row, 4000] = value
    logits[6] = 0.0
    logits[6, 0] = -0.0
    rows = [SampleRow(GREEDY, 1) for _ in range(8)]
    rows[2] = SampleRow(TOP_P, 1)
    rows[4] = SampleRow(TOP_P, 1, allowed=mask_of([]))
    rows[5] = SampleRow(GREEDY, 1, allowed=mask_of([VOCABULARY - 1]))
    rows[7] = SampleRow(TOP_P, 1, allowed=b"")
    expected = [9, None, None, None, None, VOCABULARY - 1, 0, None]
    assert draw(logits, rows) == expected
    torch_draws = [one and one.token for one in sample_tokens(logits, rows)]
    assert torch_draws == expected


def test_a_row_is_drawn_alike_beside_others() -> None:
    logits = logits_of(3)
    rows = [SampleRow(TOP_P, 5), SampleRow(GREEDY, 5), SampleRow(SamplingParams(top_k=9), 7)]
    alone = [draw(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert draw(logits, rows) == alone
    same = draw(logits[:1].expand(3, -1), rows)
    assert same[0] == alone[0]
    strided = torch.stack((logits, logits), dim=2)[:, :, 0]
    assert draw(strided, rows) == alone


def test_sampling_is_the_same_with_it() -> None:
    """With penalties, biases, masks and logprobs."""
    logits = logits_of(5).to(DEVICE)
    rows = [
        SampleRow(SamplingParams(temperature=0.7, top_p=0.9, logprobs=3, seed=2), 1),
        SampleRow(
            SamplingParams(repetition_penalty=1.4, presence_penalty=1.0, top_k=50, seed=3),
            2,
            TokenHistory([1, 2], [3, 4, 4]),
        ),
        SampleRow(SamplingParams(temperature=0.0, logit_bias=((17, 100.0),), logprobs=0), 3),
        SampleRow(SamplingParams(min_p=0.1, seed=4), 4, allowed=mask_of(range(90))),
        SampleRow(SamplingParams(temperature=5.0, top_p=0.9999, logprobs=2, seed=6), 5),
    ]
    assert sample_tokens(logits, rows, draw_rows=draw_rows) == sample_tokens(logits, rows)


class LogitsCounter(LaunchCounter):
    """Counts operators that read all logits of a row; on a GPU the others run on the host."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self.counts.copy()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not any(isinstance(one, Tensor) and one.numel() >= VOCABULARY for one in args):
            self.counts = before
        return result


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5}
LOGPROBS = {"log_softmax": 1, "gather": 1, "topk": 1}


@pytest.mark.parametrize(
    ("params", "allowed", "others"),
    [
        (SamplingParams(top_k=20, top_p=0.9), None, {}),
        (TOP_P, None, {}),
        (SamplingParams(min_p=0.05), None, {}),
        (SamplingParams(), mask_of(range(50)), {}),
        (SamplingParams(**PENALTIES), None, {"clone": 1, "change_logits": 1}),
        (SamplingParams(logit_bias=((3, 1.0),)), None, {"clone": 1, "change_logits": 1}),
        (SamplingParams(top_p=0.9, logprobs=5), None, LOGPROBS),
    ],
    ids=("top_k", "top_p", "min_p", "grammar", "penalties", "biases", "logprobs"),
)
def test_launches(
    params: SamplingParams,
    allowed: bytes | None,
    others: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = logits_of(1).to(DEVICE)
    rows = [SampleRow(params, 1, TokenHistory([1], [2]), allowed)]
    counter = LogitsCounter()
    for kernel in (sampling_kernels.draw_tokens, sampling_kernels.change_logits):
        whole = counter.count_whole(kernel.__name__, kernel)
        monkeypatch.setattr(sampling_kernels, kernel.__name__, whole)
    with counter:
        sample_tokens(logits, rows, draw_rows=draw_rows)
    assert counter.counts == {"draw_tokens": 1, **others}


def test_a_kernel_that_draws_others_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create.draws_error(DEVICE) <= create.DRAWS_TOLERANCE

    def draw_wrongly(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        drawn = torch.zeros(len(rows), 2, dtype=torch.int64)
        drawn[:, 1] = 1
        return drawn

    monkeypatch.setattr(create, "draw_rows", draw_wrongly)
    assert create.draws_error(DEVICE) > create.DRAWS_TOLERANCE
    card = torch.device("cuda", 7)
    monkeypatch.setattr(create, "find_triton_problem", lambda: "")
    for error, used in ((0.0, True), (0.5, False), (math.nan, False)):
        create._check_draws.cache_clear()
        monkeypatch.setattr(create, "draws_error", lambda _, error=error: error)
        assert (create.create_draws(card) is not None) == used
    create._check_draws.cache_clear()
    assert create.create_draws(torch.device("cpu")) is None
