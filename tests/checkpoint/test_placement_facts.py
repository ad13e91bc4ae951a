"""Facts of real folders predict what a stage loads."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.gguf_import import read_gguf_model
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.placement_facts import model_facts
from molink.facts.footprint import Footprint, StageSetup
from molink.stage.cpu_kernels.create import supports_block_weights
from molink.stage.diagnostics.device import narrow_weight_dtypes
from molink.stage.stage import Stage
from tests.support.gguf_models import Kind, write_gguf
from tests.support.models import add_draft_layer

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "granite": {},
    "smollm3": {},
    "olmo2": {},
    "glm4": {},
    "qwen2_moe": {},
    "glm4_moe": {"first_k_dense_replace": 0},
    "glm4_moe mtp": {"first_k_dense_replace": 0},
    "mimo": {},
    "mimo tied": {"tie_word_embeddings": True},
    "mistral3": {},
    "gpt_oss": {},
    "granitemoe": {},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"] * 3},
}
CPU = torch.device("cpu")
#: Families whose query and key norms are kept in f32.
NORMED = ("qwen3", "olmo2")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_weights_are_loaded_weights(
    make_model: Any, tmp_path: Path, name: str, dtype: str
) -> None:
    torch.set_num_threads(1)
    made = make_model(tmp_path, name.split()[0], dtype=dtype, **FAMILIES[name])
    if name.endswith("mtp"):
        add_draft_layer(made)
    folder = ModelFolder.open(made)
    facts = folder.placement_facts("m")
    assert facts.mtp_layers == (name.endswith("mtp") or name.startswith("mimo"))
    for wanted in ("bf16", "f32"):
        need = Footprint.of_stage(
            facts, StageSetup(dtype=wanted, narrow_dtypes=narrow_weight_dtypes(CPU))
        )
        for first, last in ((0, 3), (0, 1), (1, 2), (2, 3)):
            stage = Stage.load_layers(folder, (first, last), "cpu", wanted)
            planned = need.weight_bytes(last - first, opens=first == 0, closes=last == 3)
            # The margin is for norms, which may be kept in f32, and Qwen3's once per head. Weights
            # stored in bf16 may stay so, with an f32 bias per output.
            narrow = wanted == "f32" and dtype == "bfloat16"
            # Projections whose outputs are no multiple of 32 are planned wide, but may be packed
            # when merged.
            least, most = (0.85, 1.1) if narrow else (1.0, 1.05)
            assert least * planned <= stage.weight_bytes <= most * planned
            assert stage.block_bytes(16) == need.pool_bytes((first, last), 16)
            assert need.pool_bytes((first, last), 16) <= (last - first) * sum(
                need.average_pool_bytes(16)
            )
            layers = last - first + facts.mtp_layers * (last == 3)
            assert stage.block_bytes(16) == layers * 16 * need.token_bytes
            stage.kv_cache_dtype = "int8"
            assert stage.block_bytes(16) == layers * 16 * facts.int8_kv_bytes
            if name not in NORMED and wanted == "f32" and not narrow:
                assert stage.weight_bytes == planned


@pytest.mark.parametrize(
    ("family", "recurrent"),
    [
        ("qwen3_next", (0, 1, 3)),
        ("qwen3_5_text", (0, 1, 3)),
        ("nemotron_h", (0,)),
        ("falcon_h1", (0, 1, 2, 3)),
    ],
)
def test_planned_states_are_allocated(
    make_model: Any, tmp_path: Path, family: str, recurrent: tuple[int, ...]
) -> None:
    torch.set_num_threads(1)
    folder = ModelFolder.open(make_model(tmp_path, family, dtype="bfloat16"))
    facts = folder.placement_facts("m")
    assert facts.recurrent_layers == recurrent
    assert facts.parallel_states == (family == "falcon_h1")
    assert facts.mlp_layers == ((1, 3) if family == "nemotron_h" else ())
    need = Footprint.of_stage(facts, StageSetup(dtype="f32"))
    for layers in ((0, 4), (0, 1), (1, 3), (2, 3)):
        stage = Stage.load_layers(folder, layers, "cpu", "f32")
        count = layers[1] - layers[0]
        planned = need.weight_bytes(count, opens=layers[0] == 0, closes=layers[1] == 4)
        assert stage.weight_bytes <= 1.05 * planned
        for blocks in (1, 600, 20_000):
            nbytes = need.pool_bytes(layers, 16 * blocks)
            assert stage.pool_bytes(blocks, 16) == nbytes
            assert stage.count_blocks(nbytes, 16) >= blocks
            assert stage.pool_bytes(stage.count_blocks(nbytes, 16), 16) <= nbytes
            average, excess = need.average_pool_bytes(16 * blocks)
            assert nbytes <= count * average + excess
        stage.allocate_kv_pool(600, 16)
        held = stage._layer_pass.states.nbytes
        assert stage.pool_bytes(600, 16) == held + 600 * stage.block_bytes(16)


@pytest.mark.parametrize("mode", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_planned_quantized_weights_are_loaded_weights(
    make_model: Any, tmp_path: Path, family: str, mode: Any
) -> None:
    torch.set_num_threads(1)
    folder = ModelFolder.open(make_model(tmp_path, family, dtype="bfloat16", hidden_size=128))
    for wanted, avoid in product(("bf16", "f32"), ((), ("quantized-blocks",))):
        in_place = not avoid and supports_block_weights()
        setup = StageSetup(dtype=wanted, quantize=mode, has_block_kernels=in_place)
        need = Footprint.of_stage(folder.placement_facts("m"), setup)
        stage = Stage.load_layers(
            folder, (0, 2), "cpu", wanted, quantize=mode, disabled_kernels=avoid
        )
        planned = need.weight_bytes(2, opens=True, closes=False)
        # A CPU's nf4 kernel stores its scales in bf16.
        assert 0.95 * planned <= stage.weight_bytes <= 1.05 * planned


def test_projections_are_counted_as_quantized(make_model: Any, tmp_path: Path) -> None:
    facts = ModelFolder.open(make_model(tmp_path, "qwen2", dtype="bfloat16")).placement_facts("m")
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    elements = sum(rows * columns for rows, columns in shapes)
    assert facts.projection_bytes == 2 * elements
    assert facts.int8_bytes == elements + 4 * sum(rows for rows, _ in shapes)
    assert facts.nf4_bytes == elements // 2 + 4 * (elements // 64)
    assert facts.widest == 2 * 96 * 64
    assert facts.row_elements == 4 * 64 + 4 * 16 + max(3 * 96, 2 * 128 + 2 * 64)
    assert (facts.hidden, facts.score_heads) == (64, 0)
    assert facts.quantized == "none"


def test_a_shared_expert_is_quantized_and_its_gate_is_not(make_model: Any, tmp_path: Path) -> None:
    facts = ModelFolder.open(make_model(tmp_path, "qwen2_moe", dtype="bfloat16")).placement_facts(
        "m"
    )
    attention = 2 * 64 * 64 + 2 * 32 * 64
    experts = 6 * 3 * 32 * 64 + 3 * 64 * 64
    assert facts.projection_bytes == 2 * (attention + experts)
    biases, router, gate, norms = 64 + 2 * 32, 6 * 64, 64, 2 * 64
    assert facts.layer_bytes == facts.projection_bytes + 2 * (biases + router + gate + norms)


def test_latents_are_what_a_token_keeps(make_model: Any, tmp_path: Path) -> None:
    facts = ModelFolder.open(make_model(tmp_path, "deepseek_v3")).placement_facts("m")
    assert facts.kv_bytes == (16 + 48) * 4
    down, queries, output = (24 + 48 + 16) * 64, 4 * (16 + 16) * 24, 64 * 4 * 12
    # The projection of keys and values stays wide.
    assert facts.projection_bytes == 4 * (down + queries + output + 9 * 3 * 32 * 64)
    assert facts.widest == 2 * 96 * 64


def test_heads_too_large_for_kernels_keep_scores_on_gpus(make_model: Any, tmp_path: Path) -> None:
    usual, large = (
        ModelFolder.open(
            make_model(tmp_path / str(rank), "glm4_moe_lite", kv_lora_rank=rank)
        ).placement_facts("m")
        for rank in (48, 256)
    )
    assert (usual.large_heads, large.large_heads) == (0, 4)
    for kind, scores in (("cpu", 0), ("cuda", 4)):
        need = Footprint.of_stage(large, StageSetup(kind, reads_pages=True))
        assert need.attention_copy_bytes == 2 * (large.kv_bytes + 4 + 8 * scores)
    assert Footprint.of_stage(usual, StageSetup("cuda", reads_pages=True)).mask_bytes == 0


def test_unlike_layers_are_counted_as_the_largest_and_shared_experts_too(
    make_model: Any, tmp_path: Path
) -> None:
    fields = {"first_k_dense_replace": 2, "n_shared_experts": 2, "intermediate_size": 160}
    made = make_model(tmp_path, "glm4_moe", dtype="bfloat16", **fields)
    facts = ModelFolder.open(made).placement_facts("m")
    attention, expert = 2 * 64 * 64 + 2 * 32 * 64, 3 * 32 * 64
    assert facts.projection_bytes == 2 * (attention + (8 + 2) * expert)
    biases, router, corrections, norms = 64 + 2 * 32, 8 * 64, 8, 2 * 64
    rest = biases + router + corrections + norms
    assert facts.layer_bytes == facts.projection_bytes + 2 * rest
    # The dense layers' MLP is the widest part.
    assert facts.widest == 2 * 160 * 64


def test_experts_in_a_stack_are_counted_each(make_model: Any, tmp_path: Path) -> None:
    facts = ModelFolder.open(make_model(tmp_path, "gpt_oss", dtype="bfloat16")).placement_facts("m")
    attention, expert = 2 * 64 * 64 + 2 * 32 * 64, 3 * 32 * 64
    assert facts.projection_bytes == 2 * (attention + 6 * expert)
    biases = 64 + 2 * 32 + 64 + 6 + 6 * (2 * 32 + 64)
    norms, sinks, router = 2 * 64, 4, 6 * 64
    assert facts.layer_bytes == facts.projection_bytes + 2 * (biases + norms + sinks + router)
    assert facts.score_heads == 4
    # Results of three experts at once, their sum, and the shared expert's result.
    gated = 3 * (32 + max(2 * 32, 64)) + 2 * 64
    assert facts.row_elements == 4 * 64 + 4 * 16 + max(gated, 2 * 128 + 2 * 64)


def test_a_router_is_no_projection_and_experts_are(make_model: Any, tmp_path: Path) -> None:
    facts = ModelFolder.open(make_model(tmp_path, "mixtral", dtype="bfloat16")).placement_facts("m")
    attention = 2 * 64 * 64 + 2 * 32 * 64
    assert facts.projection_bytes == 2 * (attention + 6 * 3 * 48 * 64)
    assert facts.layer_bytes == facts.projection_bytes + 2 * (6 * 64 + 2 * 64)
    assert facts.widest == 64 * max(2 * 48, 64 + 2 * 32)


def test_narrow_weights_are_counted_when_computing_in_f32(make_model: Any, tmp_path: Path) -> None:
    """On an AVX2 PC only projections and the head stay in 16 bits."""
    made = make_model(tmp_path, "llama", dtype="bfloat16", vocab_size=300)
    facts = ModelFolder.open(made).placement_facts("m")
    assert facts.narrow is not None
    assert (facts.narrow.dtype, facts.narrow.layer) == ("bf16", facts.projection_bytes)
    assert facts.narrow.last == 0  # 300 outputs are no multiple of what all CPUs compute at once
    wide, narrow = (
        Footprint.of_stage(facts, StageSetup(bf16=False, narrow_dtypes=kept))
        for kept in (("f16",), ("bf16",))
    )
    assert wide == Footprint.of_stage(facts, StageSetup(bf16=False))
    assert (wide.first_bytes, wide.last_bytes, wide.token_bytes) == (
        narrow.first_bytes,
        narrow.last_bytes,
        narrow.token_bytes,
    )
    assert wide.layer_bytes - narrow.layer_bytes == facts.projection_bytes
    on_card = StageSetup("cuda", bf16=False, dtype="f32", narrow_dtypes=("bf16",))
    assert Footprint.of_stage(facts, on_card).layer_bytes == wide.layer_bytes


def test_weights_that_fit_no_planes_are_counted_wide_on_a_gpu(
    make_model: Any, tmp_path: Path
) -> None:
    """Rows of 96 columns stay packed on a CPU only, and those of 128 on both."""
    sizes = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    made = make_model(tmp_path / "model", "llama", 3, **sizes)
    config, tensors = read_gguf_model(write_gguf(made, tmp_path / "model.gguf", Kind.Q4_0))
    facts = model_facts(config, "m", tensors)
    assert facts.block_weights is not None
    assert facts.plane_weights is not None
    assert config.heads * config.head_dim == 128
    kept = 2 * 96 * 128  # the output projections of attention and MLP
    assert facts.plane_weights.layer == (
        kept // 32 * 18,
        facts.layer_bytes - facts.element_bytes * kept,
    )
    assert facts.block_weights.layer[0] == facts.projection_bytes // facts.element_bytes // 32 * 18


def test_weights_of_several_types_are_counted_wide(make_model: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made = make_model(tmp_path, "llama", dtype="bfloat16")
    file = made / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, file, {"format": "pt"})
    assert ModelFolder.open(made).placement_facts("m").narrow is None
