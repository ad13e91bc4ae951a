"""top_k, top_p and min_p keep the tokens that Hugging Face's processors keep."""

import pytest
import torch

from molink.stage.filters import filter_weights
from molink.wire.data import Sampling

SETTINGS = [
    Sampling(),
    Sampling(top_k=1),
    Sampling(top_k=50),
    Sampling(top_k=100),
    Sampling(top_k=10**6),
    Sampling(top_p=1e-6),
    Sampling(top_p=0.3),
    Sampling(top_p=0.95),
    Sampling(top_p=0.9999),
    Sampling(min_p=0.3),
    Sampling(min_p=1.0),
    Sampling(top_k=80, top_p=0.6),
    Sampling(top_k=3000, top_p=0.9999),
    Sampling(top_k=20, top_p=0.99, min_p=0.05),
]


def kept_by_transformers(logits, sampling):
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores, ids = logits[None].double(), torch.zeros(1, 1, dtype=torch.int64)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores[0].isfinite()


@pytest.mark.parametrize("vocabulary", [30, 64, 65, 3000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_all_together_keep_what_each_keeps_alone(vocabulary, scale):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(SETTINGS), vocabulary, generator=generator) * scale
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    kept = filter_weights(weights, SETTINGS)
    for row, sampling in enumerate(SETTINGS):
        expected = kept_by_transformers(logits[row], sampling)
        # float32 sums may put the edge of a nucleus one token off.
        assert (expected != (kept[row] > 0)).sum() <= (sampling.top_p < 1.0)
        assert torch.equal(kept[row][kept[row] > 0], weights[row][kept[row] > 0])


def test_ties_at_the_edge_stay_together():
    weights = torch.tensor([[0.5, 1.0, 0.5, 0.5, 0.1]])
    assert filter_weights(weights, [Sampling(top_k=2)]).tolist() == [[0.5, 1.0, 0.5, 0.5, 0.0]]
    assert filter_weights(weights, [Sampling(top_p=0.5)]).tolist() == [[0.5, 1.0, 0.5, 0.5, 0.0]]
