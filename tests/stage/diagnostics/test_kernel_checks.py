"""A kernel that fails on a device is replaced by the next one with a warning, and answers stay."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import UsageError
from molink.facts.dtypes import WeightDType
from molink.facts.kernels import INTEGER_KERNELS
from molink.gguf.block_formats import BLOCK_FORMATS, BlockFormat
from molink.stage.attention import work_groups as scores
from molink.stage.attention.gather import GatherAttention, PlainAttention
from molink.stage.batch import SequenceRows
from molink.stage.cpu_kernels.attention_kernel import AttentionKernel
from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
from molink.stage.cpu_kernels.create import (
    create_integer_matmul,
    create_matmul,
    create_rowwise,
    supports_block_weights,
)
from molink.stage.cpu_kernels.matmul import MatMul
from molink.stage.cpu_kernels.rowwise import RowwiseKernels
from molink.stage.decoder.norm import CompiledRmsNorm
from molink.stage.diagnostics import kernel_checks as proof
from molink.stage.diagnostics import kernel_trials as trials
from molink.stage.diagnostics.kernel_checks import (
    KernelChecks,
    check_kernels,
    describe_environment,
    find_proven_kernels,
)
from molink.stage.diagnostics.kernel_trials import KernelTrial, kernel_chains
from molink.stage.diagnostics.trial_shapes import USUAL_SHAPES, TrialShapes
from molink.stage.linear import (
    BlockLinear,
    CompiledLinear,
    experts_check,
    planes_check,
    slow_kernels,
    timing,
)
from molink.stage.linear.dense import PlainLinear
from molink.stage.linear.int8 import Int8Linear, has_onednn_int8
from molink.stage.linear.unpacked import UnpackedLinear
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES
from tests.support.gguf_models import write_gguf
from tests.support.kernels import NOT_COMPILED
from tests.support.low_bit_models import write_low_bit
from tests.support.models import MakeModel
from tests.support.stage import Ring
from tests.support.triton_device import DEVICE, needs_triton

CPU = torch.device("cpu")
#: By kernel: the function to break, and how weights are quantized.
BROKEN = {
    "compiled-linear": (MatMul, "__call__", "none"),
    "compiled-rows": (RowwiseKernels, "normalize_rows", "none"),
    "compiled-attention": (AttentionKernel, "__call__", "none"),
    "int8": (Int8Linear, "__call__", "int8"),
    "quantized-blocks": (BlockLinear, "__call__", "nf4"),
}


def instead(ring: Ring) -> dict[str, bool]:
    block = ring.stages[0]._decoder.blocks[0]
    return {
        "compiled-linear": not isinstance(block.mixer.qkv, CompiledLinear),
        "compiled-rows": not isinstance(block.input_norm, CompiledRmsNorm),
        "compiled-attention": isinstance(ring.stages[0]._attention_backend(16), GatherAttention),
        "int8": isinstance(block.mixer.qkv, UnpackedLinear),
        "quantized-blocks": not isinstance(block.mixer.qkv, BlockLinear),
    }


def looked_at(folder: Path, path: Path, **options: Any) -> tuple[str, ...]:
    opened = ModelFolder.open(folder)
    dtype, quantize = options.get("dtype", "f32"), options.get("quantize", "none")
    return check_kernels(path, opened, CPU, dtype, quantize, 16, options.get("avoid", ()))


@pytest.fixture(autouse=True)
def always_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled kernels are used however fast others are; results of checks are not kept."""
    monkeypatch.setattr(timing, "time_sides", lambda *_: (0.5, 0.5))
    slow_kernels.cache_clear()
    yield
    slow_kernels.cache_clear()


@pytest.fixture
def broken_kernels() -> Iterator[None]:
    """Kernels that are compiled while they are broken are not used by other tests."""
    yield
    create_matmul.cache_clear()
    create_rowwise.cache_clear()


@pytest.fixture
def model(make_model: MakeModel, tmp_path: Path) -> Path:
    return make_model(tmp_path, "llama", 3, dtype="bfloat16", head_dim=32)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are tried from now on."""
    names: list[str] = []
    result = KernelTrial.run_trial

    def noted(trial: KernelTrial) -> dict[str, Any]:
        names.append(trial.kernel)
        return result(trial)

    monkeypatch.setattr(KernelTrial, "run_trial", noted)
    return names


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("compiled-linear", "bf16"),
        ("compiled-linear", "f32"),
        ("compiled-rows", "bf16"),
        ("compiled-rows", "f32"),
        ("compiled-attention", "bf16"),
        ("compiled-attention", "f32"),
        ("int8", "f32"),
        ("quantized-blocks", "f32"),
    ],
)
def test_a_failing_kernel_is_replaced_by_the_next(
    broken_kernels: None,
    model: Path,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel: str,
    dtype: WeightDType,
) -> None:
    where, name, quantize = BROKEN[kernel]
    if kernel.startswith("compiled") and create_matmul(TORCH_DTYPES[dtype], 1) is None:
        pytest.skip(NOT_COMPILED[dtype])
    if kernel == "int8" and not has_onednn_int8():
        pytest.skip("this CPU has no VNNI (AVX-512): it unpacks int8 weights")
    if kernel == "quantized-blocks" and not supports_block_weights():
        pytest.skip(NOT_COMPILED["f32"])
    avoid = ("quantized-blocks",) if kernel == "int8" else ()
    options: dict[str, Any] = {
        "dtype": dtype, "quantize": quantize, "block_size": 16, "avoid": avoid,
    }  # fmt: skip
    tokens, rows = random_tokens(40), [SequenceRows(0, 40, [2, 0, 1])]
    right = make_ring(model, (1,), **options)
    assert not instead(right)[kernel]
    expected = right.run(tokens, rows)

    exact: Callable[..., Tensor] = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *given: exact(*given).roll(1, -1))
    if kernel != "compiled-attention":  # each stage checks it against ``gather`` anyway
        wrong = make_ring(model, (1,), **options).run(tokens, rows)
        assert not torch.allclose(wrong, expected, atol=0.1)
    with caplog.at_level(logging.WARNING):
        disabled_kernels = looked_at(model, tmp_path / "proofs.json", **options)
    assert disabled_kernels == (*avoid, kernel)
    (warning,) = [one for one in caplog.records if one.name == proof.__name__]
    assert warning.getMessage().startswith(f"{kernel} ({dtype}) fails on this ")
    assert "it is off by" in warning.getMessage()

    ring = make_ring(model, (1,), **{**options, "avoid": disabled_kernels})
    assert instead(ring)[kernel]
    assert (ring.run(tokens, rows) - expected).abs().mean() < 0.05 * expected.std()


def patch_fused(monkeypatch: pytest.MonkeyPatch, after: Callable[[Tensor], Tensor]) -> None:
    """Apply ``after`` to the results of fused attention, which every CPU has."""
    exact = scores.scaled_dot_product_attention

    def patched(*given: Any, **options: Any) -> Tensor:
        found = exact(*given, **options)
        return after(found) if torch.backends.cuda.flash_sdp_enabled() else found

    monkeypatch.setattr(scores, "scaled_dot_product_attention", patched)


def test_fused_attention_that_is_wrong(
    model: Path,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, rows = random_tokens(40), [SequenceRows(0, 40, [2, 0, 1])]
    expected = make_ring(model, block_size=16).run(tokens, rows)
    patch_fused(monkeypatch, lambda found: found * 1.5)
    disabled_kernels = looked_at(model, tmp_path / "proofs.json", avoid=("compiled-attention",))
    assert disabled_kernels == ("compiled-attention", "gather-attention")
    ring = make_ring(model, (1,), avoid=disabled_kernels, block_size=16)
    assert isinstance(ring.stages[0]._attention_backend(16), PlainAttention)
    torch.testing.assert_close(ring.run(tokens, rows), expected, atol=1e-4, rtol=1e-4)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_device_on_which_nothing_is_right_is_refused(
    broken_kernels: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = PlainLinear.__call__
    monkeypatch.setattr(PlainLinear, "__call__", lambda *given: exact(*given) + 1)
    with pytest.raises(UsageError, match=r"computes wrongly, .* replace torch \(f32\): it is"):
        looked_at(model, tmp_path / "proofs.json", avoid=("compiled-linear",))


def test_wrong_unpacked_weights_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without fast integer products int8 uses them, and has no other kernel."""
    avoid = ("quantized-blocks", *(("int8",) if has_onednn_int8() else ()))
    assert looked_at(model, tmp_path / "proofs.json", quantize="int8", avoid=avoid) == avoid
    exact = UnpackedLinear.__call__
    monkeypatch.setattr(UnpackedLinear, "__call__", lambda *given: exact(*given).roll(1, -1))
    with pytest.raises(UsageError, match=r"replace unpacked \(f32\): it is off by"):
        looked_at(model, tmp_path / "again.json", quantize="int8", avoid=avoid)


def test_passed_trials_are_not_repeated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: list[str]
) -> None:
    path = tmp_path / "proofs.json"
    avoid = ("compiled-attention", "quantized-blocks")
    wrong = (*avoid, "gather-attention")
    patch_fused(monkeypatch, lambda found: found * 1.5)
    assert looked_at(model, path, quantize="int8", avoid=avoid) == wrong
    assert {"int8", "compiled-rows", "gather-attention", "plain-attention"} <= set(tried)
    tried.clear()
    assert looked_at(model, path, quantize="int8", avoid=avoid) == wrong
    assert tried == []
    avoid = (*avoid, "compiled-linear")
    assert looked_at(model, path, quantize="int8", avoid=avoid) == (*avoid, "gather-attention")
    assert tried == ["torch"]


@pytest.mark.parametrize(("ratio", "slow"), [(0.5, ()), (2.0, ("compiled-linear",))])
def test_kernels_are_timed_once(
    model: Path,
    tmp_path: Path,
    make_ring: type[Ring],
    monkeypatch: pytest.MonkeyPatch,
    ratio: float,
    slow: tuple[str, ...],
) -> None:
    if create_matmul(torch.float32, 1) is None:
        pytest.skip(NOT_COMPILED["f32"])
    path = tmp_path / "proofs.json"
    monkeypatch.setattr(timing, "time_sides", lambda *_: (ratio, ratio))
    assert looked_at(model, path) == slow
    slow_kernels.cache_clear()  # as a new process does
    monkeypatch.delattr(timing, "time_sides")
    assert looked_at(model, path) == slow
    ring = make_ring(model, (1,), avoid=slow)
    assert instead(ring)["compiled-linear"] is bool(slow)


@pytest.mark.parametrize(
    "part",
    ["driver_version", "describe_device", "describe_instructions", "torch", "molink", "threads"],
)
def test_other_devices_drivers_and_versions_are_tried_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: list[str], part: str
) -> None:
    path = tmp_path / "proofs.json"
    before = describe_environment(CPU)
    looked_at(model, path)
    tried.clear()
    if part == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        monkeypatch.setattr(trials, "create_matmul", lambda *_, **__: None)
        monkeypatch.setattr(trials, "compile_attention", lambda *_: None)
    elif part in ("torch", "molink"):
        monkeypatch.setattr(getattr(proof, part), "__version__", "99.0")
    elif part in ("describe_device", "describe_instructions"):
        monkeypatch.setattr(proof, part, lambda *_: "another")
    else:
        monkeypatch.setattr(proof, part, lambda: "599.1")
        monkeypatch.setattr(proof, "describe_device", lambda _: "RTX")
        monkeypatch.setattr(proof, "describe_triton", lambda: "Triton 9.8")
        cuda = torch.device("cuda", 0)
        assert "driver 599.1; cuda RTX" not in before
        assert ", Triton 9.8, driver 599.1; cuda RTX, 0 threads" in describe_environment(cuda)
        return
    assert describe_environment(CPU) != before
    looked_at(model, path)
    assert "compiled-attention" in tried


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"environment": 3}', "x" * (1 << 20), "dir"])
def test_a_damaged_file_loses_nothing(
    model: Path, tmp_path: Path, tried: list[str], text: str
) -> None:
    path = tmp_path / "proofs.json"
    if text == "dir":
        path.mkdir()
    else:
        path.write_text(text, encoding="utf-8")
    assert looked_at(model, path) == ()
    assert "compiled-attention" in tried
    if text != "dir":
        assert json.loads(path.read_bytes())["environment"] == describe_environment(CPU)


def test_a_crashed_trial_is_retried_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: list[str]
) -> None:
    path = tmp_path / "proofs.json"

    class End(BaseException):
        """The end of the process."""

    def end(_: Tensor) -> Tensor:
        raise End

    avoid = ("compiled-attention",)
    patch_fused(monkeypatch, end)
    for _ in range(2):
        with pytest.raises(End):
            looked_at(model, path, avoid=avoid)
    assert tried[-2:] == ["gather-attention"] * 2
    tried.clear()
    assert looked_at(model, path, avoid=avoid) == (*avoid, "gather-attention")
    assert tried == ["plain-attention"]
    path.unlink()
    monkeypatch.undo()
    assert looked_at(model, path, avoid=avoid) == avoid


def test_a_kernel_that_crashes_while_it_is_timed_counts_as_slow(tmp_path: Path) -> None:
    def end() -> bool:
        raise KeyboardInterrupt

    trial = KernelTrial("triton-attention", "bf16", 1.0, lambda: 0.0, end)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            KernelChecks(tmp_path / "proofs.json", "here").is_slow(trial)
    assert KernelChecks(tmp_path / "proofs.json", "here").is_slow(trial)


def proven(path: Path, trials: tuple[KernelTrial, ...], patch: pytest.MonkeyPatch) -> set[str]:
    patch.setattr(proof, "memory_trials", lambda device: trials)
    return set(find_proven_kernels(path, CPU))


def test_a_plan_relies_on_kernels_that_have_passed_and_failed_with_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: list[str]
) -> None:
    path = tmp_path / "proofs.json"
    right = KernelTrial("gguf-blocks", "bf16", 1.0, lambda: 0.5)
    slow = KernelTrial("triton-attention", "bf16", 1.0, lambda: 0.5, lambda: True)
    wrong = KernelTrial("flash-attention", "bf16", 1.0, lambda: 2.0)
    for _ in range(2):  # read from the file the second time
        assert proven(path, (right, slow, wrong), monkeypatch) == {"gguf-blocks"}
    assert tried == ["gguf-blocks", "triton-attention", "flash-attention"]
    checks = KernelChecks(path, describe_environment(CPU))
    # Shapes of a model, in another type.
    failed = KernelTrial("gguf-blocks", "f16", 1.0, lambda: 2.0)
    assert checks.check_kernel(failed, "of a model").state == "wrong"
    assert proven(path, (right,), monkeypatch) == set()


def test_a_plan_relies_on_no_kernel_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> float:
        raise KeyboardInterrupt

    path, trial = tmp_path / "proofs.json", KernelTrial("gguf-blocks", "bf16", 1.0, end)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            proven(path, (trial,), monkeypatch)
    assert proven(path, (trial,), monkeypatch) == set()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_kernels_of_memory_plans(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(trials, "supports_bf16", lambda device: dtype == "bf16")
    found = [(one.kernel, one.dtype) for one in trials.memory_trials(torch.device("cuda", 0))]
    names = "gguf-blocks", "flash-attention", "triton-attention"
    assert found == [(name, dtype) for name in names]


def test_no_memory_for_a_trial_is_no_fault_of_a_kernel(tmp_path: Path) -> None:
    def run() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    checks = KernelChecks(tmp_path / "proofs.json", "here")
    for _ in range(3):
        assert checks.check_kernel(KernelTrial("int8", "f32", 1.0, run), "").state == "absent"
    # It is tried again once there is memory.
    right = KernelTrial("int8", "f32", 1.0, lambda: 0.0)
    assert checks.check_kernel(right, "").state == "ok"


def test_shapes_are_those_of_the_model(model: Path, make_model: MakeModel, tmp_path: Path) -> None:
    config = ModelFolder.open(model).config
    shapes = TrialShapes.from_config(config, 16, CPU)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * 32, config.kv_heads * 32
    assert set(shapes.products) == {
        (queries + 2 * keys, hidden),
        (hidden, queries),
        (2 * inner, hidden),
        (hidden, inner),
        (config.vocab_size, hidden),
    }
    assert (shapes.attention.head_dim, shapes.rotary, shapes.block_size) == (32, (32,), 16)
    windowed = ModelFolder.open(make_model(tmp_path / "g", "gemma2", 4, dtype="bfloat16")).config
    capped = TrialShapes.from_config(windowed, 16, CPU).attention
    assert capped.softcap > 0
    sunk = ModelFolder.open(make_model(tmp_path / "s", "gpt_oss", 2, dtype="bfloat16")).config
    assert TrialShapes.from_config(sunk, 16, CPU).attention.sinks
    assert set(capped.windows) == {0, min(max(windowed.windows), 33)}
    experts = ModelFolder.open(make_model(tmp_path / "m", "mixtral", 2, dtype="bfloat16")).config
    assert experts.experts is not None
    assert (hidden, experts.experts.intermediate_size) in TrialShapes.from_config(
        experts, 16, CPU
    ).products


def test_gpu_kernel_chains_end_in_a_universal_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = TrialShapes(
        (), 64, (64,), (32,), 1e-5, ("silu",), trials.AttentionShape(1, 1, 32, 1, ()), 256
    )
    names = [
        [trial.kernel for trial in chain]
        for chain in kernel_chains(shapes, "f16", "nf4", torch.device("cuda", 0))
    ]
    assert names == [
        ["nf4", "unpacked"],
        ["torch"],
        ["compiled-rows", "torch-rows"],
        ["compiled-sampling"],
        ["flash-attention", "triton-attention", "gather-attention", "plain-attention"],
    ]


def test_packed_weights_are_tried_in_the_formats_and_widths_of_the_model(
    make_model: MakeModel, tmp_path: Path
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    made = make_model(tmp_path / "model", "llama", 3, **wide)
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    write_low_bit(made, tmp_path / "stored", tmp_path / "exact", {**section, "sym": False})
    folder, card = ModelFolder.open(tmp_path / "stored"), torch.device("cuda", 0)
    shapes = TrialShapes.from_config(folder.config, 16, card, folder.tensors)
    form = BlockFormat(4, 8, 32, 32, has_shifts=True)
    assert [(replace(found, number_dtype="f16"), columns) for found, columns in shapes.planes] == [
        (form, 256),
        (form, 512),
    ]
    chains = kernel_chains(shapes, "f16", "none", card)
    assert [trial.kernel for trial in chains[0]] == ["gguf-blocks"]
    assert TrialShapes.from_config(folder.config, 16, CPU, folder.tensors).planes == ()
    assert TrialShapes.from_config(folder.config, 16, card).planes == ()


@needs_triton
def test_packed_weights_are_kept_only_where_their_products_are_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card, form = torch.device("cuda", 0), BLOCK_FORMATS["q4_0"]
    shapes = replace(USUAL_SHAPES, planes=((form, 128),))

    def find_failing(name: str) -> list[str]:
        chain = kernel_chains(shapes, "f16", "none", card)[0]
        checks = proof.KernelChecks(tmp_path / name, "here")
        monkeypatch.setattr(proof, "describe_device", lambda _: "pretend")
        return proof._find_failing(chain, checks, repr(shapes), (), card)

    assert kernel_chains(shapes, "f16", "none", card)[0][0].run_trial()["state"] == "absent"
    monkeypatch.setattr(trials, "find_planes_problem", lambda _: "")
    error = trials.planes_error
    monkeypatch.setattr(
        trials, "planes_error", lambda form, columns, dtype, _: error(form, columns, dtype, DEVICE)
    )
    assert find_failing("right") == []
    products = planes_check.multiply_fused
    monkeypatch.setattr(planes_check, "multiply_fused", lambda *given: products(*given) + 1)
    assert find_failing("wrong") == ["gguf-blocks"]


@needs_triton
def test_experts_are_multiplied_at_once_only_where_that_is_right(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = torch.device("cuda", 0)
    config = ModelFolder.open(make_model(tmp_path / "m", "qwen3_moe", 2)).config
    shapes = TrialShapes.from_config(config, 16, card)
    assert shapes.experts is not None
    assert (shapes.experts.num_experts, shapes.experts.top_k) == (8, 3)
    assert shapes.expert_planes == ((None, 32), (None, 64))
    (trial,) = next(
        chain
        for chain in kernel_chains(shapes, "f16", "none", card)
        if chain[0].kernel == "grouped-experts"
    )
    assert trial.run_trial()["state"] == "absent"
    monkeypatch.setattr(trials, "find_planes_problem", lambda _: "")
    monkeypatch.setattr(experts_check, "_ROWS", (1, 12))
    for name in ("experts_error", "routing_error"):
        measure = getattr(experts_check, name)
        monkeypatch.setattr(
            trials, name, lambda *given, measure=measure: measure(*given[:-1], DEVICE)
        )
    assert trial.run_trial()["state"] == "ok"
    products = experts_check.multiply_experts
    monkeypatch.setattr(experts_check, "multiply_experts", lambda *given: products(*given) + 1)
    checks = proof.KernelChecks(tmp_path / "checks", "here")
    monkeypatch.setattr(proof, "describe_device", lambda _: "pretend")
    assert proof._find_failing((trial,), checks, repr(shapes), (), card) == ["grouped-experts"]


@pytest.mark.parametrize("family", ["gpt_oss", "glm4", "gemma2", "mixtral", "glm4_moe_lite"])
def test_models_of_all_kinds_pass_kernel_checks(
    make_model: MakeModel, tmp_path: Path, family: str
) -> None:
    folder = make_model(tmp_path, family, 4, dtype="bfloat16")
    for dtype in ("f32", "bf16"):
        assert looked_at(folder, tmp_path / "proofs.json", dtype=dtype) == ()


@pytest.fixture
def gguf_model(make_model: MakeModel, tmp_path: Path) -> Path:
    """A model with 4-bit, 8-bit and codebook weights."""
    if create_integer_matmul(BLOCK_FORMATS["q4_k"], torch.float32, 1) is None:
        pytest.skip("this CPU has no product of integers")
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    made = make_model(tmp_path / "model", "llama", 2, **wide)
    others = {"ffn_down": Kind.Q8_0, "attn_v": Kind.IQ4_NL}
    file = write_gguf(made, tmp_path / "model.gguf", Kind.Q4_K, others=others)
    return import_gguf(file, tmp_path / "unpacked", NullCounter(), threading.Event())


@pytest.mark.parametrize(
    ("dtype", "slow", "expected"),
    [
        ("auto", (), ()),
        ("auto", INTEGER_KERNELS, INTEGER_KERNELS),
        ("auto", ("int8-rows",), ("int8-rows",)),
        ("auto", ("int8-rows-8bit",), ("int8-rows-8bit",)),
        ("f32", INTEGER_KERNELS, ()),
    ],
)
def test_rows_in_8_bits_are_timed_where_rows_may_be_rounded(
    gguf_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tried: list[str],
    dtype: str,
    slow: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    monkeypatch.setattr(trials, "has_slow_integers", lambda _, kernel: kernel in slow)
    assert looked_at(gguf_model, tmp_path / "proofs.json", dtype=dtype) == expected
    assert [name for name in tried if name in INTEGER_KERNELS] == (
        list(INTEGER_KERNELS) if dtype == "auto" else []
    )


@pytest.mark.parametrize(("mode", "kernel"), [("int8", "8bit"), ("nf4", "codebook")])
def test_rows_in_8_bits_are_tried_beside_weights_quantized_on_loading(
    model: Path, tmp_path: Path, tried: list[str], mode: str, kernel: str
) -> None:
    if not supports_block_weights():
        pytest.skip(NOT_COMPILED["f32"])
    assert looked_at(model, tmp_path / "proofs.json", dtype="auto", quantize=mode) == ()
    assert "quantized-blocks" in tried
    assert [name for name in tried if name in INTEGER_KERNELS] == [f"int8-rows-{kernel}"]


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_slow_products_in_place_are_not_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: list[str], mode: str
) -> None:
    if not supports_block_weights():
        pytest.skip(NOT_COMPILED["f32"])
    monkeypatch.setattr(trials, "has_slow_blocks", lambda *_: True)
    avoid = looked_at(model, tmp_path / "proofs.json", quantize=mode)
    assert avoid == ("quantized-blocks",)
    assert mode in tried
    stage = Stage.load_layers(
        ModelFolder.open(model), (0, 1), "cpu", "f32", mode, disabled_kernels=avoid
    )
    assert not isinstance(stage._decoder.blocks[0].mixer.qkv, BlockLinear)


def test_rows_in_8_bits_are_tried_only_beside_weights_of_few_bits(
    model: Path, tmp_path: Path, tried: list[str]
) -> None:
    assert looked_at(model, tmp_path / "proofs.json", dtype="auto") == ()
    assert not set(INTEGER_KERNELS) & set(tried)


def test_wrong_integers_are_not_used(
    gguf_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = IntegerBlockMatMul.__call__
    monkeypatch.setattr(IntegerBlockMatMul, "__call__", lambda *given: exact(*given).roll(1, -1))
    assert looked_at(gguf_model, tmp_path / "proofs.json", dtype="auto") == INTEGER_KERNELS
