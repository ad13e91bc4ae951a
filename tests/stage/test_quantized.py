"""Whole models whose projections are quantized on loading."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from molink.checkpoint.quantized_size import is_quantizable
from molink.facts.kernels import INTEGER_KERNELS
from molink.facts.model import Quantize
from molink.stage.batch import SequenceRows
from molink.stage.cpu_kernels.create import supports_block_weights
from molink.stage.linear import BlockLinear
from molink.stage.linear.int8 import quantize_int8
from molink.stage.linear.nf4 import dequantize_nf4, load_library, quantize_nf4
from tests.support.models import MakeModel
from tests.support.stage import Ring

BLOCKS = range(8)
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


def dequantize_model(folder: Path, mode: Quantize) -> None:
    """Round a model's projections as ``mode`` does."""
    load_library()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if not is_quantizable(name, weight.shape):
            continue
        shape = (weight.shape[0], weight.shape[1])
        if mode == "int8":
            codes, scales = quantize_int8(weight)
            tensors[name] = codes * (scales / 127)[:, None]
        else:
            tensors[name] = dequantize_nf4(*quantize_nf4(weight), shape, torch.float32)
    save_file(tensors, file, metadata={"format": "pt"})


#: Sizes at which a kernel also takes the recurrent layers' projections.
WIDE_STATES = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_head_dim": 32,
}


@pytest.mark.parametrize("mode", ["int8", "nf4"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "mixtral", "qwen3_next", "qwen3_5_text", "kimi_linear"]
)
def test_logits_and_greedy_text_are_those_of_the_dequantized_model(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    family: str,
    mode: Quantize,
) -> None:
    if not supports_block_weights():
        pytest.skip("this CPU has no products in place")
    is_recurrent = family.startswith(("qwen3", "kimi"))
    fields = WIDE | (WIDE_STATES if is_recurrent else {})
    stored, exact = (
        make_model(tmp_path / name, family, 3, **fields) for name in ("model", "exact")
    )
    dequantize_model(exact, mode)
    tokens, rows = random_tokens(30), [SequenceRows(0, 30, BLOCKS)]
    reference = make_ring(exact)
    expected = reference.run(tokens, rows)
    ring = make_ring(stored, (1,), quantize=mode)
    mixer = ring.stages[0]._decoder.blocks[0].mixer
    if is_recurrent:
        assert isinstance(mixer.rows, BlockLinear)
        assert not isinstance(mixer.rates, BlockLinear)
    else:
        assert isinstance(mixer.qkv, BlockLinear)
    torch.testing.assert_close(ring.run(tokens, rows), expected, atol=2e-4, rtol=0)
    assert ring.generate(tokens, 24, BLOCKS) == reference.generate(tokens, 24, BLOCKS)


@pytest.mark.parametrize("mode", ["int8", "nf4"])
@pytest.mark.parametrize("avoid", [(), INTEGER_KERNELS])
def test_decode_gives_the_same_to_the_bit_as_prefill(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    avoid: tuple[str, ...],
    mode: Quantize,
) -> None:
    if not supports_block_weights():
        pytest.skip("this CPU has no products in place")
    made = make_model(tmp_path, "llama", 3, dtype="bfloat16", **WIDE)
    tokens = random_tokens(60)
    options = {"dtype": "auto", "avoid": avoid, "quantize": mode, "block_size": 16}
    whole = make_ring(made, **options).run(tokens, [SequenceRows(0, 60, BLOCKS)])
    ring = make_ring(made, **options)
    single = [ring.run([token], [SequenceRows(at, 1, BLOCKS)]) for at, token in enumerate(tokens)]
    assert torch.equal(torch.cat(single), whole)
