"""A model from a GGUF file gives transformers' results with its blocks' values."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load, save_file

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel
from molink.facts.footprint import Footprint, StageSetup
from molink.facts.kernels import INTEGER_KERNELS
from molink.gguf.block_formats import BLOCK_FORMATS
from molink.stage.batch import SequenceRows
from molink.stage.cpu_kernels.create import create_integer_matmul, supports_block_weights
from molink.stage.diagnostics.stage_profile import profile_key
from molink.stage.stage import Stage
from tests.support.gguf_models import write_gguf
from tests.support.models import MakeModel
from tests.support.stage import Reference, Ring

BLOCKS = tuple(range(16))
#: Tokens of a prompt, and of a greedy answer, which begins two new blocks.
LENGTH, ANSWER = 60, 24
#: Weights that are unpacked become f32, so that only the order of sums differs.
EXACT: dict[str, Any] = {"avoid": ("compiled-linear",)}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
#: Sizes of recurrent layers' values that fill whole blocks.
WIDE_STATES = {"linear_value_head_dim": 32}
#: Sizes of latents that fill whole blocks.
WIDE_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {
    "swiglu_limit": 7.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
#: Settings of Falcon-H1.
FACTORS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
CASES: dict[str, tuple[str, Kind, dict[str, Any]]] = {
    "llama": ("llama", Kind.Q4_1, {}),
    "llama biased and tied": (
        "llama",
        Kind.F16,
        {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "granite": ("granite", Kind.Q8_0, {}),
    "smollm3": ("smollm3", Kind.Q8_0, {"num_hidden_layers": 5, "no_rope_layers": None}),
    "olmo2": ("olmo2", Kind.Q5_0, {}),
    "olmo3": (
        "olmo3",
        Kind.Q4_0,
        {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention"] * 2
            + ["full_attention"]
            + ["sliding_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
            },
        },
    ),
    "ministral3": ("ministral3", Kind.Q8_0, {}),
    "nemotron_h": (
        "nemotron_h",
        Kind.Q8_0,
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_head_dim": 8},
    ),
    "falcon-h1": (
        "falcon_h1",
        Kind.Q8_0,
        {
            **dict.fromkeys((f"{one}_multiplier" for one in FACTORS), 1.0),
            "mlp_multipliers": [1.0] * 2,
            "ssm_multipliers": [1.0] * 5,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        Kind.Q4_0,
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_shared_expert_intermediate_size": 64,
            "moe_latent_size": 32,
            "mamba_head_dim": 8,
        },
    ),
    # These sizes are constants in llama.cpp.
    "llama4": (
        "llama4_text",
        Kind.Q4_0,
        {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
        | {"no_rope_layers": None, "intermediate_size": 64},
    ),
    "phimoe": ("phimoe", Kind.Q4_0, {"router_jitter_noise": 0.01}),
    "cohere": ("cohere", Kind.Q8_0, {"use_qk_norm": True, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", Kind.Q4_0, {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "granitemoe": ("granitemoe", Kind.Q4_0, {}),
    "gpt_oss": ("gpt_oss", Kind.MXFP4, GPT_OSS),
    "gpt_oss in Q8_0": ("gpt_oss", Kind.Q8_0, GPT_OSS),
    "dots1": ("dots1", Kind.BF16, {}),
    "deepseek_v3": (
        "deepseek_v3",
        Kind.Q8_0,
        {
            **WIDE_LATENT,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        Kind.Q5_0,
        {
            **WIDE_LATENT,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", Kind.Q4_0, {**WIDE_LATENT, "q_lora_rank": None}),
    "ernie4_5": ("ernie4_5", Kind.Q8_0, {"tie_word_embeddings": True}),
    "ernie4_5_moe": ("ernie4_5_moe", Kind.Q4_0, {}),
    "minimax_m2": ("minimax_m2", Kind.Q8_0, {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", Kind.Q8_0, {"tie_word_embeddings": True}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", Kind.Q8_0, {}),
    "seed_oss": ("seed_oss", Kind.Q4_0, {"attention_out_bias": True}),
    "exaone4": (
        "exaone4",
        Kind.Q8_0,
        {"layer_types": ["full_attention", *["sliding_attention"] * 2]},
    ),
    "exaone4 without windows": (
        "exaone4",
        Kind.Q5_0,
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "glm4": ("glm4", Kind.Q4_0, {}),
    "glm4_moe": ("glm4_moe", Kind.Q8_0, {"use_qk_norm": True, "first_k_dense_replace": 2}),
    "qwen2_moe": ("qwen2_moe", Kind.Q8_0, {}),
    "qwen2": ("qwen2", Kind.Q8_0, {}),
    "qwen3": ("qwen3", Kind.Q5_0, {}),
    "phi3": ("phi3", Kind.Q5_1, {"sliding_window": None}),
    "mixtral": ("mixtral", Kind.Q4_0, {"intermediate_size": 64, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", Kind.BF16, {}),
    "granitemoehybrid": ("granitemoehybrid", Kind.Q8_0, {"shared_intermediate_size": 64}),
    "granitemoehybrid dense": (
        "granitemoehybrid",
        Kind.Q4_0,
        {"shared_intermediate_size": 64, "num_local_experts": 0},
    ),
    "lfm2": ("lfm2", Kind.Q8_0, {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", Kind.Q4_0, {"tie_word_embeddings": True}),
    "qwen3_next": ("qwen3_next", Kind.Q8_0, WIDE_STATES),
    "qwen3_5": ("qwen3_5_text", Kind.Q8_0, WIDE_STATES),
    "qwen3_5 as numbers": ("qwen3_5_text", Kind.F16, {"layer_types": None}),
    "qwen3_5_moe": ("qwen3_5_moe_text", Kind.BF16, {}),
    "gemma2": ("gemma2", Kind.Q8_0, {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", Kind.Q4_0, {"num_hidden_layers": 7, "query_pre_attn_scalar": 16}),
    **{
        kind.name: ("llama", kind, WIDE)
        for kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
    },
    **{kind.name: ("qwen2", kind, WIDE) for kind in (Kind.IQ4_NL, Kind.IQ4_XS)},
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text(
    make_model: MakeModel,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    name: str,
) -> None:
    family, kind, fields = CASES[name]
    folder = make_model(tmp_path / "model", family, 3, **fields)
    path = write_gguf(folder, tmp_path / "model.gguf", kind, exact=tmp_path / "exact")
    opened = import_gguf(path, tmp_path / "unpacked", NullCounter(), threading.Event())
    tokens, reference = random_tokens(LENGTH), make_reference(tmp_path / "exact")
    expected, greedy = reference.logits(tokens), reference.generate(tokens, ANSWER)
    # transformers has errors as large: large scores amplify the order of sums.
    within = 1e-5 * max(10.0, float(expected.abs().max()))
    stays = kind.name.lower() in (*BLOCK_FORMATS, "mxfp4")
    # Packed, whole and split; then unpacked.
    for splits, disabled_kernels in (
        ((), ()),
        ((1,), ()),
        *([((), ("gguf-blocks",))] if stays else []),
    ):
        ring = make_ring(opened, splits, avoid=(*disabled_kernels, "compiled-linear"))
        logits = ring.run(tokens, [SequenceRows(0, LENGTH, BLOCKS)])
        torch.testing.assert_close(logits, expected, atol=within, rtol=0)
        if not disabled_kernels:
            assert ring.generate(tokens, ANSWER, BLOCKS) == greedy


def test_a_mixture_takes_the_room_of_its_blocks(
    make_model: MakeModel,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    if not supports_block_weights():
        pytest.skip("this CPU doesn't multiply by blocks")
    made = make_model(tmp_path / "model", "llama", 3, **WIDE)
    exact, others = tmp_path / "exact", {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q8_0}
    path = write_gguf(made, tmp_path / "model.gguf", Kind.Q4_K, exact=exact, others=others)
    folder = import_gguf(path, tmp_path / "unpacked", NullCounter(), threading.Event())
    tokens = random_tokens(LENGTH)
    expected = make_reference(exact).logits(tokens)
    logits = make_ring(folder, ()).run(tokens, [SequenceRows(0, LENGTH, BLOCKS)])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
    opened = ModelFolder.open(folder)
    facts = opened.placement_facts("m")
    for first, last in ((0, 2), (0, 1), (1, 2)):
        ends = {"opens": first == 0, "closes": last == 2}
        as_blocks, as_numbers = (
            Footprint.of_stage(
                facts, StageSetup(dtype="f32", has_block_kernels=blocks)
            ).weight_bytes(last - first, **ends)
            for blocks in (True, False)
        )
        found = Stage.load_layers(opened, (first, last), "cpu", "f32").weight_bytes
        assert 0.95 * as_blocks <= found <= 1.05 * as_blocks
        assert as_blocks < as_numbers / 5


def test_scales_that_are_no_numbers_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    if not supports_block_weights():
        pytest.skip("this CPU doesn't multiply by blocks")
    made = make_model(tmp_path / "model", "llama", 3)
    path = write_gguf(made, tmp_path / "model.gguf", Kind.Q8_0)
    folder = import_gguf(path, tmp_path / "unpacked", NullCounter(), threading.Event())
    file = folder / "model.safetensors"
    tensors = load(file.read_bytes())  # Windows can't replace a file that is mapped
    name = "model.layers.1.self_attn.k_proj.weight.q8_0"
    tensors[name][5, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    save_file(tensors, file)
    with pytest.raises(BrokenModel, match=r"layers\.1\.self_attn\.k_proj\.weight holds NaN"):
        Stage.load_layers(ModelFolder.open(folder), (0, 3), "cpu", "f32")


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_blocks_are_requantized_on_request(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    mode: str,
) -> None:
    folder = make_model(tmp_path / "model", "llama", 3)
    path = write_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0, exact=tmp_path / "exact")
    opened = import_gguf(path, tmp_path / "unpacked", NullCounter(), threading.Event())
    tokens, rows = random_tokens(30), [SequenceRows(0, 30, BLOCKS)]
    expected = make_ring(tmp_path / "exact", (), quantize=mode, **EXACT).run(tokens, rows)
    logits = make_ring(opened, (1,), quantize=mode, **EXACT).run(tokens, rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("avoid", [(), *((kernel,) for kernel in INTEGER_KERNELS), INTEGER_KERNELS])
def test_decode_gives_the_same_to_the_bit_as_prefill(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    avoid: tuple[str, ...],
) -> None:
    """Recomputed tokens continue as before a loss, and cached prefixes equal computed ones."""
    if create_integer_matmul(BLOCK_FORMATS["q4_k"], torch.float32, torch.get_num_threads()) is None:
        pytest.skip("this CPU has no product of integers")
    made = make_model(tmp_path / "model", "llama", 3, **WIDE)
    others = {"ffn_down": Kind.Q8_0, "attn_v": Kind.Q6_K, "attn_output": Kind.Q5_0}
    path = write_gguf(made, tmp_path / "model.gguf", Kind.Q4_K, others=others)
    folder = import_gguf(path, tmp_path / "unpacked", NullCounter(), threading.Event())
    tokens, options = random_tokens(LENGTH), {"dtype": "auto", "avoid": avoid, "block_size": 16}
    whole = make_ring(folder, **options).run(tokens, [SequenceRows(0, LENGTH, BLOCKS)])
    ring = make_ring(folder, **options)
    single = [ring.run([token], [SequenceRows(at, 1, BLOCKS)]) for at, token in enumerate(tokens)]
    assert torch.equal(torch.cat(single), whole)
    chunks = [
        ring.run(tokens[first : first + 23], [SequenceRows(first, min(23, LENGTH - first), BLOCKS)])
        for first in range(0, LENGTH, 23)
    ]
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0])
def test_rows_keep_their_precision_if_a_dtype_is_named(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    kind: Kind,
) -> None:
    if create_integer_matmul(BLOCK_FORMATS["q4_k"], torch.float32, torch.get_num_threads()) is None:
        pytest.skip("this CPU has no product of integers")
    made = make_model(tmp_path / "model", "llama", 3, **WIDE)
    path = write_gguf(made, tmp_path / "model.gguf", kind)
    folder = import_gguf(path, tmp_path / "unpacked", NullCounter(), threading.Event())
    tokens, rows = random_tokens(LENGTH), [SequenceRows(0, LENGTH, BLOCKS)]
    ring = make_ring(folder, dtype="auto", block_size=16)
    rounded = ring.run(tokens, rows)
    others = make_ring(folder, dtype="auto", avoid=INTEGER_KERNELS, block_size=16)
    exact = others.run(tokens, rows)
    assert not torch.equal(exact, rounded)
    assert float((exact - rounded).abs().max()) < 0.1 * float(exact.abs().max())
    named = make_ring(folder, dtype=others.stages[0].dtype, block_size=16)
    assert torch.equal(named.run(tokens, rows), exact)
    assert profile_key(named.stages[0], 16) != profile_key(ring.stages[0], 16)
