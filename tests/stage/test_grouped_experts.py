"""Grouped products of experts give the same results, on a GPU or in Triton's interpreter."""

import json
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load, save_file

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.facts.footprint import Footprint, StageSetup
from molink.stage import stage as stages
from molink.stage.batch import SequenceRows
from molink.stage.decoder.expert_mlp import ExpertMlp
from molink.stage.decoder.grouped_experts import GroupedExpertMlp, GroupedExperts
from molink.stage.decoder.mlp import SharedExpertMlp
from molink.stage.gpu_kernels.block_planes import BlockPlanes
from molink.stage.linear import PlanesLinear, ProjectionFactory, experts_check, planes_check
from molink.stage.linear.experts_check import check_experts
from molink.stage.linear.planes_check import check_planes
from molink.stage.stage import Stage
from molink.stage.weights.stored_formats import unpack_mxfp4
from tests.support.gguf_models import write_gguf
from tests.support.low_bit_models import write_low_bit
from tests.support.models import MakeModel
from tests.support.stage import Reference, Ring
from tests.support.triton_device import DEVICE, needs_triton, widen_products

pytestmark = needs_triton

BLOCKS = tuple(range(16))
#: Widths that all formats can pack, and fewer layers.
WIDE = {
    "hidden_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
TWO: dict[str, Any] = {"num_hidden_layers": 2}


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Group the products of experts on this device, even if it is a CPU."""

    def probe(
        dtype: torch.dtype, device: torch.device, disabled: Collection[str] = ()
    ) -> ProjectionFactory:
        keeps = "gguf-blocks" not in disabled
        return ProjectionFactory(
            dtype,
            keeps_blocks=keeps,
            planes_device=device if keeps else None,
            experts_device=None if "grouped-experts" in disabled else device,
        )

    monkeypatch.setattr(ProjectionFactory, "probe_device", probe)
    monkeypatch.setattr(experts_check, "_ROWS", (1,))  # the others take long
    monkeypatch.setattr(planes_check, "_ROWS", (1,))
    for one in (check_planes, check_experts):
        one.cache_clear()
    if DEVICE.type == "cpu":
        widen_products(monkeypatch)
    yield
    for one in (check_planes, check_experts):
        one.cache_clear()


def find_experts(stage: Stage) -> list[Any]:
    """The mixtures of a stage."""
    mlps = [block.mlp for block in stage._decoder.blocks]
    routed = [mlp.routed if isinstance(mlp, SharedExpertMlp) else mlp for mlp in mlps]
    return [mlp for mlp in routed if isinstance(mlp, ExpertMlp | GroupedExpertMlp)]


def write_mxfp4(folder: Path) -> Path:
    """Quantize a gpt-oss's experts to MXFP4; returns a folder with their values."""
    exact, generator = folder.with_name("exact"), torch.Generator().manual_seed(0)
    exact.mkdir()
    stored = load((folder / "model.safetensors").read_bytes())
    values = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = stored.pop(name).shape
        shape = experts, rows, width // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked = unpack_mxfp4(blocks.flatten(0, 1), scales.flatten(0, 1))
        values[name] = unpacked.view(experts, rows, width).mT.contiguous()
    for file in folder.iterdir():
        (exact / file.name).write_bytes(file.read_bytes())
    save_file(stored, folder / "model.safetensors")
    save_file(values, exact / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return exact


def make_gpt_oss(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    made = make_model(folder / "model", "gpt_oss", 3, intermediate_size=192, **TWO)
    return made, write_mxfp4(made)


def make_gguf(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    made = make_model(folder / "model", "qwen3_moe", 3, **WIDE, **TWO)
    exact, others = folder / "exact", {"ffn_down_exps": Kind.Q6_K}
    path = write_gguf(made, folder / "model.gguf", Kind.Q4_K, exact=exact, others=others)
    return import_gguf(path, folder / "unpacked", NullCounter(), threading.Event()), exact


def make_awq(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
    section = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    }  # fmt: skip
    made = make_model(folder / "model", "qwen3_moe", 3, moe_intermediate_size=64, **TWO)
    return write_low_bit(made, folder / "stored", folder / "exact", section), folder / "exact"


def make_plain(family: str, **fields: Any) -> Callable[[MakeModel, Path], tuple[Path, Path]]:
    def make(make_model: MakeModel, folder: Path) -> tuple[Path, Path]:
        made = make_model(folder / "model", family, 3, **TWO, **fields)
        return made, made

    return make


#: Models, and whether their experts are stored in planes.
MODELS: dict[str, tuple[Callable[[MakeModel, Path], tuple[Path, Path]], bool]] = {
    "mixtral": (make_plain("mixtral"), False),
    "qwen3_moe, all experts": (make_plain("qwen3_moe", num_experts_per_tok=8), False),
    "qwen2_moe": (make_plain("qwen2_moe"), False),
    "glm4_moe": (make_plain("glm4_moe", n_group=2, first_k_dense_replace=0), False),
    "gpt_oss": (make_plain("gpt_oss"), False),
    "gpt_oss in MXFP4": (make_gpt_oss, True),
    "qwen3_moe in Q4_K and Q6_K": (make_gguf, True),
    "qwen3_moe in AWQ": (make_awq, True),
}


class WorkItself:
    """Replaces :class:`CudaGraphCapturer`: a graph calls the work itself, and seems faster."""

    nbytes = 0
    replayed = 0

    def __init__(self, device: torch.device) -> None:
        self._seconds = [2.0, 1.0]

    def capture_work(self, work: Callable[[], None], max_bytes: int) -> Callable[[], None]:
        def replay() -> None:
            WorkItself.replayed += 1
            work()

        return replay

    def time_work(self, work: Callable[[], object]) -> float:
        work()
        self._seconds.reverse()
        return self._seconds[1]


@pytest.mark.usefixtures("grouped")
def test_decode_steps_are_graphs(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder, tokens = make_model(tmp_path, "qwen2_moe", 3, **TWO), random_tokens(8)

    def decode() -> torch.Tensor:
        ring = make_ring(folder, (), device=str(DEVICE))
        ring.run(tokens[:5], [SequenceRows(0, 5, BLOCKS)])
        for stage in ring.stages:
            stage.capture_graph(1, 8)
        steps = [ring.run([tokens[at]], [SequenceRows(at, 1, BLOCKS)]) for at in (5, 6, 7)]
        return torch.cat(steps).cpu()

    usual = decode()
    if DEVICE.type == "cpu":
        monkeypatch.setattr(
            Stage, "_may_have_graphs", property(lambda self: self._decoder.capturable)
        )
        monkeypatch.setattr(stages, "CudaGraphCapturer", WorkItself)
        torch.testing.assert_close(decode(), usual, atol=1e-5, rtol=1e-5)
        assert WorkItself.replayed >= 3


@pytest.mark.usefixtures("grouped")
def test_mxfp4_experts_take_what_is_planned_and_what_the_file_takes(
    make_model: MakeModel, tmp_path: Path
) -> None:
    folder = ModelFolder.open(make_gpt_oss(make_model, tmp_path)[0])
    planned = Footprint.of_stage(
        folder.placement_facts("m"), StageSetup("cuda", dtype="f32", has_block_kernels=True)
    ).layer_bytes
    stage = Stage.load_layers(folder, (0, 1), str(DEVICE), "f32")
    assert stage.layer_bytes == pytest.approx(planned, rel=0.01)
    (mlp,) = find_experts(stage)
    of_file = [
        span.nbytes
        for name, span in folder.tensors.items()
        if name.startswith("model.layers.0.") and name.endswith(("_blocks", "_scales"))
    ]
    held = [mlp.group.gate_up.weight.nbytes, mlp.group.down.weight.nbytes]
    # One number more per row: 0.3 % for gpt-oss's wider rows.
    assert sum(held) == sum(of_file) + 4 * 6 * (2 * 192 + 64)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("fault", ["wrong", "disabled"])
def test_experts_run_one_by_one_where_kernels_are_wrong(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    folder = ModelFolder.open(make_gpt_oss(make_model, tmp_path)[0])
    if fault == "wrong":
        products = experts_check.multiply_experts
        monkeypatch.setattr(experts_check, "multiply_experts", lambda *given: products(*given) + 1)
    avoided = ("grouped-experts",) if fault == "disabled" else ()
    stage = Stage.load_layers(folder, (0, 1), str(DEVICE), "f32", disabled_kernels=avoided)
    (mlp,) = find_experts(stage)
    assert isinstance(mlp, ExpertMlp)
    assert isinstance(mlp.group.experts[0].gate_up, PlanesLinear)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_experts_that_are_quantized_on_loading(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    mode: str,
) -> None:
    folder = make_model(tmp_path, "qwen3_moe", 3, moe_intermediate_size=64, num_hidden_layers=1)
    tokens, rows = random_tokens(3), [SequenceRows(0, 3, BLOCKS)]
    found, expected = (
        make_ring(folder, (), device=str(DEVICE), quantize=mode, avoid=avoid)
        for avoid in ((), ("grouped-experts",))
    )
    kinds = [type(mlp) for ring in (found, expected) for mlp in find_experts(ring.stages[0])]
    assert kinds == [GroupedExpertMlp, ExpertMlp]
    (mlp,) = find_experts(found.stages[0])
    assert isinstance(mlp.group.gate_up.weight, BlockPlanes)
    assert found.stages[0].layer_bytes == expected.stages[0].layer_bytes
    torch.testing.assert_close(
        found.run(tokens, rows), expected.run(tokens, rows), atol=1e-4, rtol=1e-4
    )


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss in MXFP4"])
def test_some_experts_lie_in_host_memory(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    name: str,
) -> None:
    stored, _ = MODELS[name][0](make_model, tmp_path)
    tokens = random_tokens(9)
    whole, split = (
        make_ring(stored, (), device=str(DEVICE), host_experts=count) for count in (0, 3)
    )
    for one in split.stages[0]._decoder.split_experts:
        assert isinstance(one.resident, GroupedExperts)
    for first, last in ((0, 8), (8, 9)):
        given = tokens[first:last], [SequenceRows(first, last - first, BLOCKS)]
        expected = whole.run(*given).cpu()
        assert (split.run(*given).cpu() - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.usefixtures("grouped")
def test_experts_of_several_formats_run_one_by_one(make_model: MakeModel, tmp_path: Path) -> None:
    """GPTQ orders the columns of each by their size, so their formats may differ."""
    section = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    made = make_model(tmp_path / "model", "qwen3_moe", 3, moe_intermediate_size=64, **TWO)
    folder = ModelFolder.open(write_low_bit(made, tmp_path / "s", tmp_path / "exact", section))
    (mlp,) = find_experts(Stage.load_layers(folder, (0, 1), str(DEVICE), "f32"))
    assert isinstance(mlp, ExpertMlp)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_cuda_gives_what_the_cpu_gives(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    name: str,
    dtype: str,
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    stored, exact = MODELS[name][0](make_model, tmp_path)
    tokens, ring = random_tokens(100), make_ring(stored, (1,), dtype=dtype, device="cuda:0")
    found = [mlp for stage in ring.stages for mlp in find_experts(stage)]
    assert {type(mlp) for mlp in found} == {GroupedExpertMlp}
    for stage in ring.stages:
        stage.capture_graph(1, 100)

    def run(some: Ring) -> torch.Tensor:
        """Run many rows, few rows, and one row, which uses a graph."""
        steps = [(0, 80), (80, 19), (99, 1)]
        return torch.cat(
            [
                some.run(tokens[at : at + count], [SequenceRows(at, count, BLOCKS)]).cpu()
                for at, count in steps
            ]
        )

    found_logits, expected = run(ring), run(make_ring(exact))
    if dtype == "f32":
        assert (found_logits - expected).abs().max() < 5e-4 * expected.abs().max()
    else:
        assert (found_logits - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    make_model: MakeModel,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    name: str,
) -> None:
    make, packed = MODELS[name]
    stored, exact = make(make_model, tmp_path)
    tokens, reference = random_tokens(9), make_reference(exact)
    ring = make_ring(stored, (1,), device=str(DEVICE))
    expected = reference.logits(tokens)
    for first, last in ((0, 8), (8, 9)):
        logits = ring.run(tokens[first:last], [SequenceRows(first, last - first, BLOCKS)]).cpu()
        assert (logits - expected[first:last]).abs().max() < 5e-4 * expected.abs().max()
    found = [mlp for stage in ring.stages for mlp in find_experts(stage)]
    assert len(found) == 2
    assert all(isinstance(mlp, GroupedExpertMlp) for mlp in found)
    kept = [
        isinstance(one.weight, BlockPlanes) for one in (found[0].group.gate_up, found[0].group.down)
    ]
    assert kept == [packed, packed]
    assert all(stage._decoder.capturable for stage in ring.stages)
