"""A stage with low-bit weights in planes gives the same, on a GPU or in Triton's interpreter."""

import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.facts.footprint import Footprint, StageSetup
from molink.facts.model import Quantize
from molink.stage.batch import SequenceRows
from molink.stage.linear import (
    ConcatenatedLinear,
    PlanesLinear,
    ProjectionFactory,
    planes_check,
)
from molink.stage.linear.planes_check import check_planes
from molink.stage.stage import Stage
from tests.support.bnb_models import both
from tests.support.gguf_models import write_gguf
from tests.support.low_bit_models import write_low_bit
from tests.support.models import MakeModel
from tests.support.stage import Reference, Ring
from tests.support.triton_device import DEVICE, needs_triton, widen_products

pytestmark = needs_triton

BLOCKS = tuple(range(16))
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": True,
    "sym": False,
    "checkpoint_format": "gptq",
}


def write_file(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    """A model from a GGUF file of several types, and one of its blocks' values."""
    made = make_model(folder / "model", "llama", 3, **WIDE)
    exact, others = folder / "exact", {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q8_0}
    path = write_gguf(made, folder / "model.gguf", Kind.Q4_K, exact=exact, others=others)
    return import_gguf(path, folder / "unpacked", NullCounter(), threading.Event()), exact


def write_iq4(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    made, exact = make_model(folder / "model", "llama", 3, **WIDE), folder / "exact"
    others = {"attn_q": Kind.IQ4_NL, "attn_k": Kind.IQ4_NL, "attn_v": Kind.IQ4_NL}
    path = write_gguf(made, folder / "model.gguf", Kind.IQ4_XS, exact=exact, others=others)
    return import_gguf(path, folder / "unpacked", NullCounter(), threading.Event()), exact


def write_fp8(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    made = make_model(folder / "model", "qwen3", 3, **WIDE)
    return write_low_bit(made, folder / "stored", folder / "exact", section), folder / "exact"


def write_channels(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    """Write FP8 with a scale per row."""
    return write_compressed(make_model, folder, "float-quantized", num_bits=8, strategy="channel")


def write_nvfp4(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    return write_compressed(make_model, folder, "nvfp4-pack-quantized", num_bits=4, group_size=16)


def write_mxfp4(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    return write_compressed(make_model, folder, "mxfp4-pack-quantized", num_bits=4, group_size=32)


def write_compressed(
    make_model: MakeModel, folder: Path, layout: str, **weights: Any
) -> tuple[Path, Path]:
    usual = {"type": "float", "symmetric": True, "strategy": "group", **weights}
    group = {"targets": ["Linear"], "weights": usual, "input_activations": None}
    method = {"quant_method": "compressed-tensors", "format": layout}
    section = {**method, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    made = make_model(folder / "model", "llama", 3, **WIDE)
    return write_low_bit(made, folder / "stored", folder / "exact", section), folder / "exact"


def write_int8(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    return both(make_model(folder / "model", "llama", 3, **WIDE), folder, "int8")


def write_nf4(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    return both(make_model(folder / "model", "qwen2", 3, **WIDE), folder, "double")


def write_gptq(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    made = make_model(folder / "model", "qwen2", 3, **WIDE)
    return write_low_bit(made, folder / "stored", folder / "exact", GPTQ), folder / "exact"


@pytest.fixture
def in_planes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Store weights in planes on this device, even if it is a CPU."""

    def probe(
        dtype: torch.dtype, device: torch.device, disabled: Collection[str] = ()
    ) -> ProjectionFactory:
        keeps = "gguf-blocks" not in disabled
        return ProjectionFactory(dtype, keeps_blocks=keeps, planes_device=device if keeps else None)

    monkeypatch.setattr(ProjectionFactory, "probe_device", probe)
    monkeypatch.setattr(planes_check, "_ROWS", (1,))  # the others take long
    check_planes.cache_clear()
    if DEVICE.type == "cpu":
        widen_products(monkeypatch)
    yield
    check_planes.cache_clear()


def count_packed(stage: Stage) -> int:
    """Number of a stage's weights that are stored in planes."""
    blocks = stage._decoder.blocks
    made = [
        one for block in blocks for one in (block.mixer.qkv, block.mixer.output, block.mlp.gate_up)
    ]
    made += [block.mlp.down for block in blocks]
    parts = [
        part
        for one in made
        for part in (one.parts if isinstance(one, ConcatenatedLinear) else (one,))
    ]
    return sum(isinstance(part, PlanesLinear) for part in parts)


def assert_packed(ring: Ring) -> None:
    """Check the numbers of packed weights; low-bit checkpoints leave one of the second layer in
    full.
    """
    first, second = (count_packed(stage) for stage in ring.stages)
    assert first >= 4
    assert second >= 3


def assert_equal_logits(found: Tensor, expected: Tensor) -> None:
    """Scores of 100 in random models' attention amplify differences of the order of sums."""
    assert (found - expected).abs().max() < 5e-4 * expected.abs().max()


WRITERS = [
    write_file,
    write_gptq,
    write_fp8,
    write_channels,
    write_nvfp4,
    write_mxfp4,
    write_iq4,
    write_int8,
    write_nf4,
]


@pytest.mark.usefixtures("in_planes")
@pytest.mark.parametrize("write", WRITERS)
def test_logits_are_those_of_the_dequantized_model(
    make_model: MakeModel,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    write: Callable[[MakeModel, Path], tuple[Path, Path]],
) -> None:
    stored, exact = write(make_model, tmp_path)
    tokens, reference = random_tokens(13), make_reference(exact)
    ring = make_ring(stored, (1,), device=str(DEVICE))
    expected = reference.logits(tokens)
    for first, last in ((0, 12), (12, 13)):
        logits = ring.run(tokens[first:last], [SequenceRows(first, last - first, BLOCKS)])
        assert_equal_logits(logits.cpu(), expected[first:last])
    assert_packed(ring)
    if write in (write_file, write_iq4):
        assert isinstance(ring.stages[0]._decoder.embedding, PlanesLinear)


@pytest.mark.usefixtures("in_planes")
def test_weights_take_what_is_planned(make_model: MakeModel, tmp_path: Path) -> None:
    opened = ModelFolder.open(write_file(make_model, tmp_path)[0])
    setup = StageSetup("cuda", dtype="f32", has_block_kernels=True)
    planned = Footprint.of_stage(opened.placement_facts("m"), setup)
    found = Stage.load_layers(opened, (0, 2), str(DEVICE), "f32").weight_bytes
    assert found == pytest.approx(planned.weight_bytes(2, opens=True, closes=True), rel=0.05)


@pytest.mark.usefixtures("in_planes")
@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_weights_are_dequantized_where_products_are_wrong(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    products = planes_check.multiply_fused

    def multiply(*given: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("PTX can't be assembled")
        return products(*given) + 1

    monkeypatch.setattr(planes_check, "multiply_fused", multiply)
    opened = ModelFolder.open(write_gptq(make_model, tmp_path)[0])
    assert count_packed(Stage.load_layers(opened, (0, 2), str(DEVICE), "f32")) == 0


@pytest.mark.usefixtures("in_planes")
@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_weights_that_are_quantized_on_loading(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    mode: Quantize,
) -> None:
    made = make_model(tmp_path / "model", "llama", 3, **WIDE)
    tokens, rows = random_tokens(20), [SequenceRows(0, 20, BLOCKS)]
    ring = make_ring(made, (1,), device=str(DEVICE), quantize=mode)
    assert [count_packed(stage) for stage in ring.stages] == [4, 4]
    slow = make_ring(made, (1,), device=str(DEVICE), quantize=mode, avoid=("gguf-blocks", mode))
    assert [count_packed(stage) for stage in slow.stages] == [0, 0]
    assert_equal_logits(ring.run(tokens, rows), slow.run(tokens, rows))
    setup = StageSetup("cuda", dtype="f32", quantize=mode)
    planned = Footprint.of_stage(ModelFolder.open(made).placement_facts("m"), setup).layer_bytes
    assert [stage.layer_bytes for stage in ring.stages] == [planned, planned]


@pytest.mark.gpu
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_cuda_gives_what_the_cpu_gives(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    write: Callable[[MakeModel, Path], tuple[Path, Path]],
    dtype: str,
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    stored, exact = write(make_model, tmp_path)
    tokens = random_tokens(100)
    ring = make_ring(stored, (1,), dtype=dtype, device="cuda:0")
    assert_packed(ring)

    def run(some: Ring) -> Tensor:
        """Run many rows, few rows, and one row, which use different products."""
        steps = [(0, 80), (80, 19), (99, 1)]
        return torch.cat(
            [
                some.run(tokens[start : start + count], [SequenceRows(start, count, BLOCKS)]).cpu()
                for start, count in steps
            ]
        )

    found, expected = run(ring), run(make_ring(exact))
    if dtype == "f32":
        assert_equal_logits(found, expected)
    else:
        assert (found - expected).abs().mean() < 0.05 * expected.std()
