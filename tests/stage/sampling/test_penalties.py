"""Penalties and biases compared with plain references."""

import torch
from torch import Tensor

from molink.stage.sampling.logits_processors import SampleRow, apply_penalties
from molink.stage.sampling.token_history import TokenHistory
from molink.wire.messages.data_plane import SamplingParams


def reference(logits: Tensor, s: SamplingParams, prompt: list[int], generated: list[int]) -> Tensor:
    """OpenAI's and Hugging Face's formulas, token by token."""
    result = logits.clone()
    for token in set(prompt) | set(generated):
        value = result[token]
        factor = s.repetition_penalty
        result[token] = value * factor if value < 0 else value / factor
    for token in generated:
        result[token] -= s.frequency_penalty
    for token in set(generated):
        result[token] -= s.presence_penalty
    for token, bias in s.logit_bias:
        result[token] += bias
    return result


def test_rows_with_different_settings() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    everything = SamplingParams(
        repetition_penalty=0.8,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((3, -100.0), (7, 4.5)),
    )
    cases = [
        (SamplingParams(), [1, 2], [3]),
        (SamplingParams(repetition_penalty=1.7), [1, 2, 2, 5], [5, 29]),
        (SamplingParams(presence_penalty=0.5), [1], [3, 3, 4]),
        (SamplingParams(frequency_penalty=-0.7), [1], [3, 3, 4]),
        (everything, [3, 8], [8, 8, 0]),
    ]
    found = apply_penalties(
        logits, [SampleRow(s, 9, TokenHistory(*tokens)) for s, *tokens in cases]
    )
    expected = torch.stack([reference(logits[i], *case) for i, case in enumerate(cases)])
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[0], logits[0])


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[4, 9, 4, 17]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    row = SampleRow(SamplingParams(repetition_penalty=1.3), 4, TokenHistory([4, 9], [4, 17]))
    torch.testing.assert_close(apply_penalties(logits, [row]), expected)


def test_nothing_to_do_copies_nothing() -> None:
    logits = torch.randn(2, 30)
    assert (
        apply_penalties(logits, [SampleRow(SamplingParams(), 0, TokenHistory([1], [2]))] * 2)
        is logits
    )


def test_ids_beyond_the_vocabulary_are_passed_over() -> None:
    logits = torch.randn(2, 30)
    sampling_params = SamplingParams(repetition_penalty=2.0, logit_bias=((30, 5.0), (10**6, 1.0)))
    row = SampleRow(sampling_params, 2, TokenHistory([30, -1], [99, -7]))
    assert torch.equal(apply_penalties(logits, [row, row]), logits)


def test_no_history_yet() -> None:
    logits = torch.randn(2, 30)
    sampling_params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    assert torch.equal(
        apply_penalties(
            logits, [SampleRow(sampling_params, 0), SampleRow(sampling_params, 0, TokenHistory())]
        ),
        logits,
    )
