"""Experts in MXFP4: how they are stored and loaded, and which are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.hub import HubFile, HubRepository, _files_of_layers
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel, UnsupportedModel
from molink.facts.footprint import Footprint, StageSetup
from molink.stage.batch import SequenceRows
from molink.stage.cpu_kernels.create import supports_block_weights
from molink.stage.stage import Stage
from molink.stage.weights.stored_formats import unpack_mxfp4
from molink.swarm.artifacts.fetch_plan import group_tensors, plan_group
from molinkd.peer.artifacts.model_repository import ModelRepository
from tests.support.models import MakeModel
from tests.support.stage import Reference, Ring

LENGTH = 40
BLOCKS = tuple(range(12, 0, -1))
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def folders(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A gpt-oss in MXFP4, and one with the experts that transformers unpacks from it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = make_model(tmp_path_factory.mktemp("packed"), "gpt_oss", dtype="bfloat16")
    plain = Path(shutil.copytree(packed, tmp_path_factory.mktemp("plain"), dirs_exist_ok=True))
    generator = torch.Generator().manual_seed(0)
    stored = load((packed / "model.safetensors").read_bytes())
    unpacked = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = stored.pop(name).shape
        shape = (experts, rows, width // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, packed / "model.safetensors")
    save_file(unpacked, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"quantization_config": QUANTIZED})
    (packed / "config.json").write_text(text, encoding="utf-8")
    return packed, plain


@pytest.fixture
def damaged(folders: tuple[Path, Path], tmp_path: Path) -> Callable[..., Path]:
    """``damaged(**tensors)``: the MXFP4 model with other tensors; ``None`` removes one."""

    def damage(tensors: dict[str, Tensor | None]) -> Path:
        folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
        changed = load((folder / "model.safetensors").read_bytes()) | tensors
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        return folder

    return damage


@pytest.mark.parametrize("splits", [(), (1,), (1, 2)])
def test_mxfp4_gives_what_its_values_give(
    folders: tuple[Path, Path],
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    splits: tuple[int, ...],
) -> None:
    tokens, reference = random_tokens(LENGTH), make_reference(folders[1])
    ring = make_ring(folders[0], splits)
    logits = ring.run(tokens, [SequenceRows(0, LENGTH, BLOCKS)])
    torch.testing.assert_close(logits, reference.logits(tokens), atol=1e-4, rtol=0)
    assert ring.generate(tokens, 16, BLOCKS) == reference.generate(tokens, 16)


@pytest.mark.parametrize(("mode", "tolerance"), [("int8", 0.15), ("nf4", 0.7)])
def test_quantized_anew(
    folders: tuple[Path, Path],
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    mode: str,
    tolerance: float,
) -> None:
    tokens, rows = random_tokens(LENGTH), [SequenceRows(0, LENGTH, BLOCKS)]
    expected = make_ring(folders[0]).run(tokens, rows)
    logits = make_ring(folders[0], (1,), quantize=mode).run(tokens, rows)
    assert 0 < (logits - expected).abs().mean() < tolerance * expected.std()


def test_every_code_and_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    values = unpack_mxfp4(codes, torch.full((16, 1), 128, dtype=torch.uint8))
    line = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert torch.equal(values[:, 0::2], 2 * line.expand(16, -1))
    assert torch.equal(values[:, 1::2], 2 * line[:, None].expand(-1, 16))
    ends = torch.tensor([[0], [254], [255]], dtype=torch.uint8)
    ones = unpack_mxfp4(torch.full((3, 1, 16), 0x22, dtype=torch.uint8), ends)[:, 0]
    assert ones[:2].tolist() == [2.0**-127, 2.0**127]
    assert ones[2].isnan()


def test_the_manifest_has_stored_tensors(folders: tuple[Path, Path], tmp_path: Path) -> None:
    holding, config = (
        ModelRepository().add_model("m", folders[0]),
        ModelConfig.load_folder(folders[0]),
    )
    for name in holding.manifest.files:
        (tmp_path / name).write_bytes((folders[0] / name).read_bytes())
    for group, shapes in group_tensors(config, 1, 2).items():
        plan = plan_group(group, shapes, holding.manifest.tensors)
        pieces = [holding.read_chunk(piece.part.name, piece.index) for piece in plan.chunk_runs()]
        (tmp_path / plan.file).write_bytes(plan.header + b"".join(pieces))
    opened = ModelFolder.open(tmp_path, (1, 2))
    assert f"{DOWN}_blocks" in opened.tensors
    assert {*opened.tensors} == {*ModelFolder.open(folders[0]).stage_tensors(1, 2)}


def test_the_hubs_files_of_some_layers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copy(folders[0] / "config.json", tmp_path)
    names = load_file(folders[0] / "model.safetensors")
    mapped = {name: "b" if name.startswith(DOWN) else "a" for name in names}
    index = json.dumps({"weight_map": mapped})
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    files = (HubFile("a", 1, "0"), HubFile("b", 1, "1"))
    repository = HubRepository("O/N", "0" * 40, files, tmp_path)
    chosen = _files_of_layers(repository, tmp_path, (1, 2))
    assert [file.name for file in chosen] == [file.name for file in repository.weight_files]
    assert [file.name for file in _files_of_layers(repository, tmp_path, (0, 1))] == ["a"]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{DOWN}_blocks", torch.zeros(6, 64, 1, 15, dtype=torch.uint8), "has shape"),
        (f"{DOWN}_blocks", torch.zeros(7, 64, 1, 16, dtype=torch.uint8), "has shape"),
        (f"{DOWN}_scales", torch.zeros(6, 64, 2, dtype=torch.uint8), "has shape"),
        (f"{DOWN}_scales", None, "down_proj_scales"),
        (f"{DOWN}_bias", torch.zeros(6, 63, dtype=torch.bfloat16), "has shape"),
        (f"{DOWN}_extra", torch.zeros(1), "does not fit"),
    ],
)
def test_misfits_are_named(
    damaged: Callable[..., Path], name: str, tensor: Tensor | None, message: str
) -> None:
    with pytest.raises(BrokenModel, match=message):
        ModelFolder.open(damaged({name: tensor}))


def test_weights_take_what_is_planned_on_cpus(folders: tuple[Path, Path]) -> None:
    if not supports_block_weights():
        pytest.skip("this CPU doesn't multiply by blocks")
    opened = ModelFolder.open(folders[0])
    setup = StageSetup("cpu", dtype="bf16", has_block_kernels=True)
    planned = Footprint.of_stage(opened.placement_facts("m"), setup)
    layers = opened.config.layers
    found = Stage.load_layers(opened, (0, layers), "cpu", "bf16").weight_bytes
    wanted = planned.weight_bytes(layers, opens=True, closes=True)
    assert found == pytest.approx(wanted, rel=0.05)


def test_other_types_are_named(damaged: Callable[..., Path]) -> None:
    wrong = torch.zeros(6, 64, 1, 16, dtype=torch.int8)
    with pytest.raises(UnsupportedModel, match=r"down_proj_blocks is I8; supported here: U8"):
        ModelFolder.open(damaged({f"{DOWN}_blocks": wrong}))


def test_a_missing_mxfp4_scale_is_nan(damaged: Callable[..., Path], make_ring: type[Ring]) -> None:
    scales = torch.full((6, 64, 1), 255, dtype=torch.uint8)
    folder = damaged({f"{DOWN}_scales": scales})
    with pytest.raises(BrokenModel, match=r"experts\.0\.down_proj\.weight holds NaN"):
        make_ring(folder)
