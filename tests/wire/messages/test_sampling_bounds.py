"""Sampling parameters are bounded to what float32 can compute."""

import math
from typing import Any

import msgspec
import pytest

from molink.wire.messages.data_plane import SamplingParams


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e300},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"min_p": math.nan},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": math.nan},
        {"presence_penalty": math.inf},
        {"frequency_penalty": -math.inf},
        {"logit_bias": ((1, 1e30),)},
        {"logit_bias": ((1, math.inf),)},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": ((-1, 1.0),)},
        {"seed": -1},
        {"seed": 2**60},
        {"top_k": 2**40},
        {"logprobs": 21},
    ],
    ids=str,
)
def test_sampling_parameters_are_bounded(extreme: dict[str, Any]) -> None:
    encoded = msgspec.msgpack.encode(SamplingParams(**extreme))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=SamplingParams)
