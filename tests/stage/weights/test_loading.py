"""Loading holds at most a part of a layer in full precision at a time."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel
from molink.stage.batch import SequenceRows
from molink.stage.linear import CompiledLinear, ProjectionFactory, quantized
from molink.stage.stage import Stage
from molink.stage.weights.weight_reader import WeightReader
from tests.support.models import MakeModel
from tests.support.stage import Ring

LAYERS = 8
LAYER_BYTES = 4 * (4 * 256 * 256 + 3 * 256 * 1024)


def is_gone(reference: weakref.ref[torch.Tensor]) -> bool:
    return reference() is None


class Allocations(TorchDispatchMode):
    """Counts the bytes that operators' results hold, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        #: Whether a tensor is freed, and its bytes.
        self._live: dict[int, tuple[Callable[[], bool], int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage).expired, storage.nbytes()
            else:  # oneDNN's packed weights
                gone = partial(is_gone, weakref.ref(tensor))
                self._live[id(tensor)] = gone, tensor.nbytes
        self._live = {key: item for key, item in self._live.items() if not item[0]()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


@contextmanager
def counted() -> Iterator[Allocations]:
    with Allocations() as allocations:
        yield allocations


@pytest.fixture(scope="module")
def folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    made = make_model(
        tmp_path_factory.mktemp("model"),
        "llama",
        0,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_key_value_heads=4,
        head_dim=64,
    )
    opened = ModelFolder.open(made)
    # A first load, so that one-time kernel checks aren't counted.
    Stage.load_layers(opened, (0, 1), dtype="f32")
    return opened


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_quantizing_takes_less_than_the_stage_and_two_layers(
    folder: ModelFolder, mode: str
) -> None:
    with counted() as allocations:
        stage = Stage.load_layers(folder, (0, LAYERS), dtype="f32", quantize=mode)
    assert stage.weight_bytes < allocations.peak < stage.weight_bytes + 2 * LAYER_BYTES


def test_the_error_measure_includes_unquantized_parts(folder: ModelFolder) -> None:
    with counted() as allocations:
        stage = Stage.load_layers(folder, (0, LAYERS), dtype="f32")
    assert LAYERS * LAYER_BYTES < stage.weight_bytes <= allocations.peak


def test_weights_that_stay_in_16_bits_are_packed_in_parts(
    make_model: MakeModel, tmp_path: Path, make_ring: type[Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    projections = ProjectionFactory.probe_device(torch.float32, torch.device("cpu"))
    if not projections.keeps_dtype(torch.bfloat16):
        pytest.skip("this CPU has no product for them")
    fields = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 512, "head_dim": 64}
    made = make_model(tmp_path, "qwen2", 0, dtype="bfloat16", **fields)
    monkeypatch.setattr("molink.stage.weights.weight_reader._MAX_PACKED_WEIGHTS", 128 * 128)
    whole: list[str] = []
    parts: list[int] = []
    merge, put = WeightReader._merge_tensors, CompiledLinear.put_rows

    def merged(reader: WeightReader, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        whole.extend(names)
        return merge(reader, names, dtype)

    def taken(linear: CompiledLinear, first: int, part: torch.Tensor) -> None:
        parts.append(part.numel())
        put(linear, first, part)

    monkeypatch.setattr(WeightReader, "_merge_tensors", merged)
    monkeypatch.setattr(CompiledLinear, "put_rows", taken)
    tokens, rows = [5, 300, 2, 77], [SequenceRows(0, 4, (0,))]
    found = make_ring(made).run(tokens, rows)
    # Neither whole projections nor the head are copied; the embedding is kept as f32.
    assert {name for name in whole if "proj.weight" in name or "head" in name} == set()
    assert max(parts) == 128 * 512  # a block of the product is the smallest part
    assert sum(parts) == 3 * 128 * (2 * 256 + 2 * 128 + 3 * 512) + 512 * 128
    monkeypatch.setattr(ProjectionFactory, "create_empty", lambda *_: None)
    assert torch.equal(make_ring(made).run(tokens, rows), found)
    assert [name for name in whole if "head" in name] == ["lm_head.weight"]


def test_a_large_weight_is_quantized_in_parts(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes needs several times the bytes of what it quantizes at once."""
    given: list[int] = []
    quantize = quantized.quantize_nf4
    monkeypatch.setattr("molink.stage.linear.unpacked._MAX_WEIGHTS", 2**16)
    monkeypatch.setattr(
        quantized, "quantize_nf4", lambda rows: (given.append(rows.numel()), quantize(rows))[1]
    )
    whole = Stage.load_layers(folder, (1, 2), dtype="f32", quantize="nf4")
    assert max(given) <= 2**16
    assert sum(given) == LAYER_BYTES // 4
    assert whole.weight_bytes < LAYER_BYTES / 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mode", ["none", "int8", "nf4"])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_a_weight_that_is_no_number_is_named(
    qwen: Path, tmp_path: Path, name: str, mode: str, value: float
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {key: tensor.clone() for key, tensor in load_file(qwen / FILE).items()}
    tensors[name].view(-1)[-1] = value
    for path in qwen.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(BrokenModel, match=f"{FILE}: tensor {name} holds NaN or infinity"):
        Stage.load_layers(ModelFolder.open(tmp_path), (0, 3), dtype="f32", quantize=mode)


FILE = "model.safetensors"


@pytest.fixture(scope="module")
def qwen(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen"), "qwen2", 0)


def test_large_weights_whose_sum_overflows_are_fine(qwen: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.0.mlp.down_proj.weight"
    tensors = {key: tensor.clone() for key, tensor in load_file(qwen / FILE).items()}
    tensors[name].fill_(1e36)
    for path in qwen.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / FILE)
    opened = ModelFolder.open(tmp_path)
    assert Stage.load_layers(opened, (0, 3), dtype="f32").weight_bytes > 0
    with pytest.raises(BrokenModel, match=rf"{name} holds .*float16"):
        Stage.load_layers(opened, (0, 3), dtype="f16")
