"""Tokens follow the sampling parameters, by noise that depends only on seed and position."""

import math
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from molink.stage.sampling import sampler
from molink.stage.sampling import token_draws as draws
from molink.stage.sampling.sampler import SampleRow, sample_tokens
from molink.stage.sampling.token_draws import uniform_noise
from molink.stage.sampling.token_history import TokenHistory
from molink.wire.messages.data_plane import (
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0.0)


def logits_of(rows: int, vocabulary: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: Tensor, sampling: SamplingParams, seeds: range) -> list[int]:
    """The tokens drawn from one row of logits with each of many seeds."""
    rows = [
        SampleRow(SamplingParams(**{**as_dict(sampling), "seed": seed}), position=7)
        for seed in seeds
    ]
    return [token.token for token in sample_tokens(logits.expand(len(rows), -1), rows)]


def as_dict(sampling: SamplingParams) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(3, 50)
    logits[0, [9, 30]] = 2.0
    logits[1, 49] = 1.0
    assert [t.token for t in sample_tokens(logits, [SampleRow(GREEDY, 0)] * 3)] == [9, 49, 0]


def test_no_rows() -> None:
    assert sample_tokens(torch.empty(0, 50), []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite(bad: float, temperature: float) -> None:
    logits = logits_of(3, 20)
    logits[1, 4] = bad
    sampling_params = SamplingParams(temperature=temperature, logprobs=2)
    found = sample_tokens(logits, [SampleRow(sampling_params, 0)] * 3)
    assert found[1] is None
    assert found[0] is not None
    assert found[2] is not None


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 5e-324},
        {"temperature": MAX_TEMPERATURE},
        {"top_p": 5e-324},
        {"min_p": 5e-324},
        {"min_p": 1.0},
        {"top_k": 2**31 - 1},
        {"repetition_penalty": MIN_REPETITION_PENALTY},
        {"repetition_penalty": MAX_REPETITION_PENALTY},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"logit_bias": ((1, -100.0), (2, 100.0), (2**31 - 1, 100.0))},
        {"seed": 2**53},
        {"logprobs": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 3.0, 1e4])
def test_every_extreme_that_the_wire_lets_through_gives_a_token(
    extreme: dict[str, Any], scale: float
) -> None:
    sampling_params = msgspec.msgpack.decode(
        msgspec.msgpack.encode(SamplingParams(**extreme)), type=SamplingParams
    )
    row = SampleRow(sampling_params, 2**53, TokenHistory([1, 2], [3] * 1000))
    logits = logits_of(3, 256, scale=scale)
    for found in sample_tokens(logits, [row] * 3):
        assert found is not None
        assert 0 <= found.token < 256


def test_the_logits_are_left_unchanged() -> None:
    logits = logits_of(2, 40)
    before = logits.clone()
    sampling_params = SamplingParams(
        temperature=0.5, top_p=0.8, repetition_penalty=1.3, logit_bias=((3, 5.0),), logprobs=3
    )
    sample_tokens(logits, [SampleRow(sampling_params, 1, TokenHistory([1, 2], [3]))] * 2)
    assert torch.equal(logits, before)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = logits_of(1, 300)
    row = SampleRow(SamplingParams(seed=11), 5)
    alone = sample_tokens(logits, [row])[0]
    others = [SampleRow(SamplingParams(seed=3, top_k=5), 1), row, SampleRow(GREEDY, 1)]
    among = sample_tokens(torch.cat([logits_of(1, 300, 1), logits, logits_of(1, 300, 2)]), others)[
        1
    ]
    assert among.token == alone.token
    seeds = {
        sample_tokens(logits, [SampleRow(SamplingParams(seed=s), 5)])[0].token for s in range(30)
    }
    places = {
        sample_tokens(logits, [SampleRow(SamplingParams(seed=11), p)])[0].token for p in range(30)
    }
    assert len(seeds) > 3
    assert len(places) > 3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.8, min_p=0.02),
    ],
)
def test_frequencies_follow_the_distribution(sampling: SamplingParams) -> None:
    logits, draws = logits_of(1, 40, scale=2.0), 4000
    expected = reference_weights(logits[0], sampling)
    counts = Counter(draw(logits, sampling, range(draws)))
    assert set(counts) <= {i for i, p in enumerate(expected.tolist()) if p > 0}
    # Chi-squared over all tokens: its mean is the number of tokens, its spread sqrt(2 x number).
    kept = [(p * draws, counts[i]) for i, p in enumerate(expected.tolist()) if p > 0]
    chi = sum((seen - mean) ** 2 / mean for mean, seen in kept)
    assert chi < len(kept) + 5 * math.sqrt(2 * len(kept))


@pytest.mark.parametrize("vocabulary", [50, 300, 8192, 20000])
@pytest.mark.parametrize("step", [0.0, 0.125])
def test_tokens_are_those_of_the_plain_formula(vocabulary: int, step: float) -> None:
    """On each code path: from the likeliest tokens, or from all, in blocks or not."""
    settings = [
        {},
        {"temperature": 0.5, "top_k": 20, "top_p": 0.8},
        {"top_k": 1},
        {"top_k": 64},
        {"top_k": 5000},
        {"top_p": 0.95},
        {"top_p": 0.99999},
        {"temperature": 3.0, "top_p": 0.97},
        {"min_p": 0.2},
        {"min_p": 1e-9},
    ]
    logits = logits_of(len(settings), vocabulary)
    if step:  # with many ties, as in bf16 logits
        logits = (logits / step).round() * step
    for seed in range(5):
        rows = [SampleRow(SamplingParams(seed=seed, **each), 3) for each in settings]
        found = [each.token for each in sample_tokens(logits, rows)]
        expected = [plain_formula(logits[i], row.sampling_params) for i, row in enumerate(rows)]
        assert found == expected
        alone = [sample_tokens(logits[i : i + 1], [row])[0].token for i, row in enumerate(rows)]
        assert alone == found


def plain_formula(logits: Tensor, sampling: SamplingParams) -> int:
    """The token for noise at position 3: the filters by sorting, then the inverse cumulative sum.

    Tokens as likely as the last one kept stay.
    """
    weights = ((logits.double() - logits.max()) / sampling.temperature).exp()
    if sampling.top_k:
        weights[weights < weights.sort(descending=True).values[: sampling.top_k][-1]] = 0
    ordered = weights.sort(descending=True).values
    inside = ordered.cumsum(0) - ordered < sampling.top_p * ordered.sum()
    weights[weights < max(ordered[inside][-1], sampling.min_p)] = 0
    cumulative = weights.cumsum(0)
    aim = cumulative[-1] * uniform_noise(sampling.seed, 3)
    return int((cumulative <= aim).sum())


def reference_weights(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities by transformers' own processors."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores, ids = logits[None].double(), torch.zeros(1, 1, dtype=torch.int64)
    if sampling.temperature != 1.0:
        scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = logits_of(4, 100)
    rows = [SampleRow(SamplingParams(temperature=temperature, seed=i), i) for i in range(4)]
    assert [t.token for t in sample_tokens(logits, rows)] == logits.argmax(-1).tolist()


def test_logprobs_are_the_models_own() -> None:
    logits = logits_of(3, 60)
    expected = logits.log_softmax(-1)
    biased = SamplingParams(temperature=0.0, logprobs=3, logit_bias=((5, 100.0),))
    plain, none = SamplingParams(temperature=2.0, seed=4, logprobs=0), SamplingParams(seed=1)
    first, second, third = sample_tokens(
        logits, [SampleRow(biased, 2), SampleRow(plain, 2), SampleRow(none, 2)]
    )
    assert first.token == 5
    assert first.logprob == pytest.approx(expected[0, 5].item(), abs=1e-5)
    values, ids = expected[0].topk(3)
    assert [token for token, _ in first.top] == ids.tolist()
    assert [value for _, value in first.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.logprob == pytest.approx(expected[1, second.token].item(), abs=1e-5)
    assert second.top == ()
    assert math.isnan(third.logprob)


def test_a_token_drawn_late_has_its_own_logprob() -> None:
    logits = logits_of(3, 9000, scale=0.1)  # so flat that the 64 likeliest are not enough
    wide = SamplingParams(temperature=1.0, top_p=0.99, logprobs=2, seed=4)
    rows = [SampleRow(wide, 3), SampleRow(GREEDY, 3), SampleRow(wide, 4)]
    expected = logits.log_softmax(dim=-1)
    found = sample_tokens(logits, rows)
    for row in (0, 2):
        assert found[row].token not in logits[row].topk(64).indices
        assert found[row].logprob == pytest.approx(float(expected[row, found[row].token]))
        assert [token for token, _ in found[row].top] == expected[row].topk(2).indices.tolist()
    assert math.isnan(found[1].logprob)


@pytest.mark.parametrize("top_k", [0, 40, 500])
def test_a_gpu_is_synchronized_once(monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    asked: list[int] = []

    def fetch(parts: list[Tensor]) -> list[Tensor]:
        asked.append(len(parts))
        return parts

    monkeypatch.setattr(sampler, "download_tensors", fetch)
    monkeypatch.setattr(draws, "download_tensors", fetch)
    usual = SamplingParams(temperature=0.7, top_p=0.9, top_k=top_k, logprobs=3, seed=1)
    rows = [SampleRow(usual, 1), SampleRow(GREEDY, 1), SampleRow(usual, 2)]
    assert None not in sample_tokens(logits_of(3, 9000), rows)
    assert asked == [4]


def test_a_missing_copy_is_not_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(parts: list[Tensor]) -> list[Tensor]:
        parts[0][1] = torch.tensor([-1, 9])  # as before a copy has arrived
        return parts

    monkeypatch.setattr(sampler, "download_tensors", fetch)
    found = sample_tokens(logits_of(3, 90), [SampleRow(GREEDY, 1)] * 3)
    assert [each is None for each in found] == [False, True, False]


def test_logprobs_of_given_tokens() -> None:
    logits = logits_of(3, 50)
    given = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(7, 3, 7, 50, 2**31 - 1))
    nothing = SamplingParams(temperature=0.0, logprobs=1, logprob_token_ids=(50,) * 20)
    wide = SamplingParams(temperature=0.0, logprobs=5)
    found = sample_tokens(logits, [SampleRow(one, 0) for one in (given, wide, nothing)])
    expected = logits.log_softmax(dim=-1)
    for row, token in enumerate(found):
        assert token is not None
        for index, logprob in token.top:
            assert logprob == pytest.approx(float(expected[row, index]), abs=1e-6)
    assert [token and len(token.top) for token in found] == [2, 5, 1]
    assert found[0] is not None
    assert {index for index, _ in found[0].top} == {3, 7}


def test_more_logprobs_than_tokens() -> None:
    found = sample_tokens(logits_of(1, 5), [SampleRow(SamplingParams(logprobs=20), 0)])[0]
    assert len(found.top) == 5
