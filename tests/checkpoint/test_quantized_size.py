"""Sizes of quantized weights, and which weights are quantized."""

import pytest

from molink.checkpoint.quantized_size import can_hold, is_quantizable, quantized_bytes


def test_bytes_of_a_projection() -> None:
    assert quantized_bytes((4096, 1024), "none", 2) == 4096 * 1024 * 2
    assert quantized_bytes((4096, 1024), "int8", 2) == 4096 * 1024 + 4096 * 4
    assert quantized_bytes((4096, 1024), "nf4", 2) == 4096 * 1024 * 9 // 16  # 4.5 bits
    assert quantized_bytes((3, 5), "nf4", 2) == 8 + 4


@pytest.mark.parametrize(
    ("name", "shape", "quantized"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.11.mlp.experts.3.gate_proj.weight", (64, 64), True),
        ("model.layers.11.block_sparse_moe.experts.3.w1.weight", (64, 64), True),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.input_layernorm.weight", (64,), False),
        ("model.layers.0.mlp.gate.weight", (8, 64), False),
        ("model.layers.0.block_sparse_moe.gate.weight", (8, 64), False),
        ("model.embed_tokens.weight", (320, 64), False),
        ("lm_head.weight", (320, 64), False),
    ],
)
def test_quantizable_weights(name: str, shape: tuple[int, ...], quantized: bool) -> None:
    assert is_quantizable(name, shape) == quantized


def test_nf4_needs_whole_blocks_of_each_part() -> None:
    assert can_hold("nf4", [(64, 10), (32, 10)])
    assert not can_hold("nf4", [(33, 32), (31, 32)])
    assert can_hold("int8", [(33, 32), (31, 32)])
    assert can_hold("none", [(1, 1)])
