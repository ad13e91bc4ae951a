"""Facts from configs of families with recurrent layers, in the form published on the hub."""

from collections.abc import Callable
from typing import Any

from molink.checkpoint.quantized_size import is_quantizable
from molink.checkpoint.tensor_layout import (
    adaptable_projections,
    layer_tensors,
)
from tests.support.family_configs import FULL, LINEAR


def test_nemotron_h_as_on_the_hub(load: Callable[..., Any]) -> None:
    config = load("nemotron_h", hybrid_override_pattern="ME*-", mamba_num_heads=8, head_dim=24)
    assert (config.recurrent_layers, config.mlp_layers) == ({0}, {1, 3})
    assert (config.count_attention((0, 4)), config.count_recurrent((0, 4))) == (1, 1)
    assert config == load(
        "nemotron_h",
        layers_block_type=["mamba", "moe", "attention", "mlp"],
        num_hidden_layers=...,
        mamba_num_heads=8,
        head_dim=24,
    )
    assert [config.rope_index(layer) for layer in range(4)] == [None] * 4
    assert (config.activation, config.norm_eps) == ("relu2", 1e-5)
    names = [
        {name.removeprefix(f"model.layers.{layer}.") for name in layer_tensors(config, layer)}
        for layer in range(4)
    ]
    assert {"norm.weight", "mamba.A_log", "mamba.in_proj.weight"} <= names[0]
    assert {"mlp.experts.7.up_proj.weight", "mlp.shared_experts.up_proj.weight"} <= names[1]
    assert names[2] == {"norm.weight", *(f"self_attn.{one}_proj.weight" for one in "qkvo")}
    assert names[3] == {"norm.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert layer_tensors(config, 3)["model.layers.3.mlp.up_proj.weight"] == (128, 96)


def test_olmo_hybrid_has_norms_by_kind(load: Callable[..., Any]) -> None:
    config = load("olmo_hybrid", rope_parameters={"rope_theta": None})
    assert (config.recurrent_layers, config.rope_index(3)) == ({0, 1, 2}, None)
    shapes = layer_tensors(config, 0)
    found = {name.removeprefix("model.layers.0."): shape for name, shape in shapes.items()}
    assert {name for name in found if "layernorm" in name} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    # Keys of 0.75 * 96 / 4 dimensions, and values of twice as many.
    assert found["linear_attn.q_conv1d.weight"] == (72, 1, 4)
    assert found["linear_attn.v_conv1d.weight"] == (144, 1, 4)
    assert found["linear_attn.g_proj.weight"] == (144, 96)
    assert found["linear_attn.o_norm.weight"] == (36,)
    assert "model.layers.3.post_feedforward_layernorm.weight" in layer_tensors(config, 3)
    assert load("olmo_hybrid", rope_theta=5e5).rope_index(3) == 0
    assert load("olmo_hybrid", linear_allow_neg_eigval=False).recurrent.rate_scale == 1.0


def test_kimi_linear_as_on_the_hub(load: Callable[..., Any]) -> None:
    config = load(
        "kimi_linear",
        model_max_length=1048576,
        num_experts=8,
        num_experts_per_token=4,
        num_shared_experts=2,
        num_expert_group=2,
        topk_group=1,
        moe_renormalize=False,
        moe_intermediate_size=32,
        mla_use_nope=True,
        q_lora_rank=None,
        linear_attn_config={
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 16,
            "num_heads": 6,
            "short_conv_kernel_size": 3,
        },
    )
    assert (config.recurrent_layers, config.rope_index(2)) == ({0, 1, 3}, None)
    assert config.max_model_len == 1048576
    experts = config.experts
    assert (experts.num_experts, experts.top_k, experts.groups) == (8, 4, 2)
    assert (experts.renormalize, experts.scale, experts.dense_layers) == (False, 2.446, {0})
    assert experts.shared_intermediate_size == 64
    shapes = layer_tensors(config, 1)
    found = {name.removeprefix("model.layers.1."): shape for name, shape in shapes.items()}
    assert found["self_attn.k_conv1d.weight"] == (96, 1, 3)
    assert found["self_attn.A_log"] == (1, 1, 6, 1)
    assert found["self_attn.f_b_proj.weight"] == found["self_attn.g_b_proj.weight"] == (96, 16)
    assert found["self_attn.b_proj.weight"] == (6, 96)
    assert found["block_sparse_moe.experts.7.w2.weight"] == (96, 32)
    assert found["block_sparse_moe.shared_experts.up_proj.weight"] == (64, 96)
    assert "model.layers.0.mlp.up_proj.weight" in layer_tensors(config, 0)
    kept = [name for name, shape in shapes.items() if not is_quantizable(name, shape)]
    assert {f"model.layers.1.self_attn.{one}_proj.weight" for one in ("b", "f_a", "f_b")} < {*kept}
    assert "model.layers.1.self_attn.g_b_proj.weight" not in kept
    listed = {"layer_types": [LINEAR, FULL] * 2, "linear_num_heads": 2}
    assert load("kimi_linear", **listed).recurrent_layers == {0, 2}
    assert load("kimi_linear", **listed).recurrent.memory_shape == (2, 128, 128)


def test_falcon_h1_has_attention_beside_mamba(load: Callable[..., Any]) -> None:
    fields = {"mamba_d_ssm": 192, "mamba_n_heads": 6, "mamba_d_state": 16}
    config = load(
        "falcon_h1",
        **fields,
        key_multiplier=0.5,
        attention_out_multiplier=0.25,
        mlp_multipliers=[0.75, 2.0],
        ssm_multipliers=[1.0, 2.0, 3.0, 4.0, 5.0],
        ssm_in_multiplier=0.5,
    )
    factors = config.output_factors
    assert (factors.heads, factors.gate_up) == ((1.0, 0.5, 0.25), (0.75, 2.0))
    assert factors.recurrent == (0.5, 1.0, 1.5, 2.0, 2.5)
    assert (config.count_attention((0, 4)), config.count_recurrent((0, 4))) == (4, 4)
    names = {name.removeprefix("model.layers.1.") for name in layer_tensors(config, 1)}
    assert {"mamba.in_proj.weight", "self_attn.q_proj.weight", "pre_ff_layernorm.weight"} <= names
    assert {"feed_forward.gate_proj.weight", "input_layernorm.weight"} <= names
    assert "mamba.norm.weight" not in names
    assert adaptable_projections(config, 1) == {}


def test_qwen3_next_has_recurrent_layers(load: Callable[..., Any]) -> None:
    config = load("qwen3_next", num_hidden_layers=8, full_attention_interval=4)
    assert config.recurrent_layers == {0, 1, 2, 4, 5, 6}
    assert config == load(
        "qwen3_next", num_hidden_layers=8, layer_types=([LINEAR] * 3 + [FULL]) * 2
    )
    assert [config.count_attention(layers) for layers in ((0, 3), (3, 4), (0, 8))] == [0, 1, 2]
    assert (config.keeps_states, config.head_dim, config.gated_heads) == (True, 256, True)
    assert (config.norm_offset, config.rope.rotary_dim(config.head_dim)) == (1.0, 64)
    recurrent = layer_tensors(config, 0)
    assert not any("self_attn" in name for name in recurrent)
    assert recurrent["model.layers.0.linear_attn.in_proj_qkvz.weight"] == (2 * 6144, 96)
    assert recurrent["model.layers.0.linear_attn.in_proj_ba.weight"] == (64, 96)
    assert recurrent["model.layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert recurrent["model.layers.0.linear_attn.out_proj.weight"] == (96, 4096)
    attended = layer_tensors(config, 3)
    assert not any("linear_attn" in name for name in attended)
    assert attended["model.layers.3.self_attn.q_proj.weight"] == (2 * 4 * 256, 96)
    assert attended["model.layers.3.self_attn.o_proj.weight"] == (96, 4 * 256)


def test_qwen3_5_has_projections_by_kind(load: Callable[..., Any]) -> None:
    shapes = layer_tensors(load("qwen3_5_text"), 0)
    sizes = {"qkv": 8192, "z": 4096, "b": 32, "a": 32}
    for name, size in sizes.items():
        assert shapes[f"model.layers.0.linear_attn.in_proj_{name}.weight"] == (size, 96)
    assert load("qwen3_5_text").experts is None
    experts = load("qwen3_5_moe_text", intermediate_size=...).experts
    assert (experts.num_experts, experts.top_k, experts.renormalize) == (256, 8, True)
    assert (experts.intermediate_size, experts.shared_intermediate_size) == (512, 512)


def test_lfm2_has_short_convolutions(load: Callable[..., Any]) -> None:
    fields = {"full_attn_idxs": [1, 3], "norm_eps": 3e-5, "rms_norm_eps": ...}
    config = load("lfm2", block_ff_dim=12288, **fields)
    assert (config.recurrent_layers, config.norm_eps) == ({0, 2}, 3e-5)
    assert (config.intermediate_size, config.tied_embeddings, config.rope.theta) == (
        8192,
        True,
        1e6,
    )
    shapes = layer_tensors(config, 0)
    assert shapes["model.layers.0.conv.conv.weight"] == (96, 1, 3)
    assert shapes["model.layers.0.conv.in_proj.weight"] == (3 * 96, 96)
    assert shapes["model.layers.0.feed_forward.w2.weight"] == (96, 8192)
    assert layer_tensors(config, 1)["model.layers.1.self_attn.out_proj.weight"] == (96, 96)
    # As released: no intermediate_size.
    assert load("lfm2", block_ff_dim=12288, intermediate_size=..., **fields) == config
    plain = load("lfm2", block_auto_adjust_ff_dim=False, tie_embedding=False)
    assert (plain.intermediate_size, plain.tied_embeddings, plain.keeps_states) == (
        128,
        False,
        False,
    )
    listed = ["conv", FULL, "conv", FULL]
    experts = load("lfm2_moe", layer_types=listed, num_experts=8).experts
    assert (experts.dense_layers, experts.scoring, experts.is_corrected) == (
        {0, 1},
        "sigmoid",
        True,
    )


def test_granite_4_has_mamba_or_attention(load: Callable[..., Any]) -> None:
    fields = {"mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 2}
    listed = ["mamba", "mamba", "attention", "mamba"]
    config = load("granitemoehybrid", layer_types=listed, **fields)
    assert config == load(
        "granitemoehybrid",
        layer_types=[LINEAR, LINEAR, FULL, LINEAR],
        time_step_limit=[0.0, {"__float__": "Infinity"}],
        mamba_d_head=32,
        **fields,
    )
    assert (config.recurrent_layers, config.rope_index(2)) == ({0, 1, 3}, None)
    shapes = layer_tensors(config, 0)
    assert shapes["model.layers.0.mamba.in_proj.weight"] == (2 * 192 + 2 * 2 * 16 + 6, 96)
    assert shapes["model.layers.0.mamba.conv1d.bias"] == (256,)
    assert shapes["model.layers.0.shared_mlp.input_linear.weight"] == (2048, 96)
    dense = load(
        "granitemoehybrid",
        layer_types=[FULL] * 4,
        num_local_experts=0,
        shared_intermediate_size=200,
        position_embedding_type="rope",
    )
    assert (dense.experts, dense.recurrent, dense.intermediate_size) == (None, None, 200)
    assert dense.rope_index(0) == 0
    found = layer_tensors(dense, 3)
    assert found["model.layers.3.shared_mlp.output_linear.weight"] == (96, 200)
