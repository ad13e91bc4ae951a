"""Only tokens that the grammar allows are sampled, with any sampling parameters."""

import math

import numpy as np
import pytest
import torch

from molink.stage.sampling import sampler
from molink.stage.sampling import token_draws as draw
from molink.stage.sampling.sampler import SampleRow, sample_tokens
from molink.wire.messages.data_plane import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def bits(*tokens: int, vocabulary: int) -> bytes:
    chosen = np.zeros(vocabulary, np.uint8)
    chosen[list(tokens)] = 1
    return np.packbits(chosen, bitorder="little").tobytes()


def logits_of(rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("vocabulary", [50, 300, 8192 + 7])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(temperature=2.0, top_k=100, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1),
        SamplingParams(temperature=1.0, logit_bias=((3, 100.0),), repetition_penalty=1.0),
    ],
    ids=str,
)
def test_only_allowed_tokens_are_picked(vocabulary: int, sampling: SamplingParams) -> None:
    logits = logits_of(64, vocabulary)
    allowed = {1, 17, vocabulary - 1}
    mask = bits(*allowed, vocabulary=vocabulary)
    rows = [SampleRow(sampling, position, None, mask) for position in range(64)]
    found = [token.token for token in sample_tokens(logits, rows) if token is not None]
    assert len(found) == 64
    assert set(found) <= allowed
    best = logits[:, sorted(allowed)].argmax(dim=1)
    if sampling == GREEDY:
        assert found == [sorted(allowed)[index] for index in best]
    else:
        assert len(set(found)) > 1


def test_other_rows_are_as_they_were() -> None:
    logits = logits_of(3, 300)
    free = sample_tokens(logits, [SampleRow(GREEDY, 0)] * 3)
    rows = [SampleRow(GREEDY, 0), SampleRow(GREEDY, 0, None, bits(7, vocabulary=300))]
    mixed = sample_tokens(logits, [*rows, SampleRow(GREEDY, 0)])
    assert [mixed[0], mixed[2]] == [free[0], free[2]]
    assert mixed[1] is not None
    assert mixed[1].token == 7


def test_logprobs_stay_those_of_the_model() -> None:
    logits = logits_of(1, 300)
    row = SampleRow(SamplingParams(temperature=0.0, logprobs=2), 0, None, bits(7, vocabulary=300))
    (found,) = sample_tokens(logits, [row])
    assert found is not None
    assert found.logprob == pytest.approx(float(logits[0].log_softmax(-1)[7]))
    assert all(math.isfinite(logprob) for _, logprob in found.top)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, top_k=4)])
def test_no_allowed_token_means_no_token(sampling: SamplingParams) -> None:
    rows = [SampleRow(sampling, 0, None, bits(vocabulary=300)), SampleRow(sampling, 0)]
    assert [token is None for token in sample_tokens(logits_of(2, 300), rows)] == [True, False]


def test_tokens_beyond_a_mask_are_forbidden() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 299] = 9.0
    (found,) = sample_tokens(logits, [SampleRow(GREEDY, 0, None, b"\x10")])
    assert found is not None
    assert found.token == 4


def test_few_allowed_tokens_need_no_full_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("all logits of a row were looked at again")

    monkeypatch.setattr(draw.TokenDraws, "_draw_all", never)
    mask = bits(5, 6, vocabulary=8192)
    row = SampleRow(SamplingParams(temperature=1.0, top_k=40), 0, None, mask)
    assert sampler.sample_tokens(logits_of(1, 8192), [row])[0] is not None
