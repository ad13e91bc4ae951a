"""top_k, top_p and min_p keep the same tokens as Hugging Face's processors."""

import pytest
import torch
from torch import Tensor

from molink.stage.sampling.filters import SamplingFilters, find_cutoff, weigh_logits
from molink.wire.messages.data_plane import SamplingParams

SETTINGS = [
    SamplingParams(),
    SamplingParams(top_k=1),
    SamplingParams(top_k=50),
    SamplingParams(top_k=100),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=0.9999),
    SamplingParams(min_p=0.3),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=80, top_p=0.6),
    SamplingParams(top_k=3000, top_p=0.9999),
    SamplingParams(top_k=20, top_p=0.99, min_p=0.05),
]


def kept_by_transformers(logits: Tensor, sampling: SamplingParams) -> Tensor:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores, ids = logits[None].double(), torch.zeros(1, 1, dtype=torch.int64)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores[0].isfinite()


def thresholds(
    likeliest: Tensor, logits: Tensor, settings: list[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """Thresholds of the rows ``logits``, from their ``likeliest`` tokens."""
    noise = [0.5] * len(settings)
    filters = SamplingFilters.from_sampling(settings, noise, logits.shape[1], torch.device("cpu"))
    totals = weigh_logits(logits, logits.amax(-1, keepdim=True), filters).sum(-1, keepdim=True)
    return find_cutoff(likeliest, totals, filters)


def kept(logits: Tensor, settings: list[SamplingParams]) -> Tensor:
    minimum, _ = thresholds(logits.sort(-1, descending=True).values, logits, settings)
    return logits >= minimum


@pytest.mark.parametrize("vocabulary", [30, 64, 65, 3000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_batched_filters_equal_single_ones(vocabulary: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(SETTINGS), vocabulary, generator=generator) * scale
    found = kept(logits, SETTINGS)
    for row, sampling_params in enumerate(SETTINGS):
        expected = kept_by_transformers(logits[row], sampling_params)
        # Another order of summing may move the edge of a nucleus by a token.
        assert (expected != found[row]).sum() <= (sampling_params.top_p < 1.0)


@pytest.mark.parametrize("size", [1, 7, 64, 2999])
@pytest.mark.parametrize("step", [0.0, 0.25])
def test_cutoff_among_candidates_equals_that_of_the_whole_row(size: int, step: float) -> None:
    logits = torch.randn(len(SETTINGS), 3000, generator=torch.Generator().manual_seed(size)) * 4
    if step:  # with many ties, as in bf16 logits
        logits = (logits / step).round() * step
    ordered = logits.sort(-1, descending=True).values
    minimum, _ = thresholds(ordered, logits, SETTINGS)
    found, enough = thresholds(ordered[:, :size], logits, SETTINGS)
    assert torch.equal(found[enough], minimum[enough])
    assert (minimum[enough, 0] > ordered[enough, size - 1]).all(), "more may be as likely"
    assert enough.any() or size == 1
    assert not enough[SETTINGS.index(SamplingParams())]


def test_ties_at_the_edge_stay_together() -> None:
    logits = torch.tensor([[0.5, 1.0, 0.5, 0.5, 0.1]]).log()
    for sampling_params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        assert kept(logits, [sampling_params]).tolist() == [[True, True, True, True, False]]
