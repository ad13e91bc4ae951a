"""Arguments of the flash kernel, with a fake kernel; on a GPU, the real kernel's results."""

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Never

import pytest
import torch
from torch import Tensor

from molink.errors import UsageError
from molink.stage.attention import backend_check as probe
from molink.stage.attention.backend_check import create_checked_flash
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.create import create_attention
from molink.stage.attention.flash import PAGE_MULTIPLE, FlashAttention, find_kernel
from molink.stage.attention.gather import GatherAttention

MIXES = {
    "decode": [(7, 1), (40, 1), (8, 1), (0, 1)],
    "one": [(21, 1)],
    "chunks": [(16, 5), (0, 9), (63, 2)],
    "decode before": [(33, 1), (2, 1), (50, 1), (0, 30), (24, 11)],
    "mixed": [(33, 1), (0, 30), (2, 1), (24, 11), (50, 1)],
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("groups", [1, 3])
def test_the_kernel_is_told_the_right_things(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    paged: Callable[..., Tensor],
    mix: str,
    groups: int,
) -> None:
    shape = shape_of(groups=groups, windows=(0, 1, 4, 6, 64, 4096), scale=0.3)
    check(FlashAttention(shape, paged), shape, MIXES[mix])


def test_decode_rows_are_packed_and_chunks_causal(
    shape_of: Callable[..., AttentionShape],
    check: Callable[..., None],
    paged: Callable[..., Tensor],
) -> None:
    told = []

    def kernel(*given: Tensor | int, **options: Any) -> Tensor:
        told.append((given[5], options["window_size"]))
        return paged(*given, **options)

    shape = shape_of(windows=(0, 5, 4096))
    check(FlashAttention(shape, kernel), shape, [(9, 1), (12, 4), (3, 1), (0, 6)])
    assert told == [
        (1, (-1, -1)), (6, (-1, 0)),
        (1, (4, 0)), (6, (4, 0)),
        (1, (-1, -1)), (6, (-1, 0)),
    ]  # fmt: skip


def fake_cuda(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Any] | None) -> torch.device:
    """A fake device with a fake kernel: tensors stay on the CPU."""
    monkeypatch.setattr(probe, "find_kernel", lambda: kernel)
    asked = probe._difference
    monkeypatch.setattr(probe, "_difference", lambda *given: asked(*given[:-1], CPU))
    return torch.device("cuda:0")


def test_a_correct_kernel_is_used(
    monkeypatch: pytest.MonkeyPatch,
    shape_of: Callable[..., AttentionShape],
    paged: Callable[..., Tensor],
) -> None:
    device = fake_cuda(monkeypatch, paged)
    shape = shape_of(windows=(0, 4096, 30))
    found, reason = create_checked_flash(shape, 2 * PAGE_MULTIPLE, torch.bfloat16, device)
    assert isinstance(found, FlashAttention)
    assert reason == ""
    made = create_attention("auto", shape, PAGE_MULTIPLE, torch.float16, device)
    assert isinstance(made, FlashAttention)


def without_a_window(paged: Callable[..., Tensor]) -> Callable[..., Any]:
    def kernel(*given: Tensor | int, **options: Any) -> Tensor:
        left, _ = options["window_size"]
        return paged(*given, **options | {"window_size": (-1, 0) if left >= 0 else (-1, -1)})

    return kernel


def raising(paged: Callable[..., Tensor]) -> Callable[..., Any]:
    def kernel(*given: Tensor | int, **options: Any) -> None:
        raise NotImplementedError("no kernel image is available")

    return kernel


def unusable(paged: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda *given, **options: paged(*given, **options) * math.nan


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda paged: None, "no varlen_attn with a block table"),
        (raising, "no kernel image"),
        (without_a_window, "off by"),
        (unusable, "off by nan"),
    ],
)
def test_anything_else_means_gather(
    monkeypatch: pytest.MonkeyPatch,
    shape_of: Callable[..., AttentionShape],
    paged: Callable[..., Tensor],
    make: Callable[..., Any],
    why: str,
) -> None:
    device = fake_cuda(monkeypatch, make(paged))
    shape = shape_of(windows=(0, 4096))
    found, reason = create_checked_flash(shape, PAGE_MULTIPLE, torch.bfloat16, device)
    assert found is None
    assert why in reason
    made = create_attention("auto", shape, PAGE_MULTIPLE, torch.bfloat16, device)
    assert isinstance(made, GatherAttention)
    with pytest.raises(UsageError, match="use auto or gather"):
        create_attention("flash", shape, PAGE_MULTIPLE, torch.bfloat16, device)


def test_gathering_never_runs_cudnn(
    monkeypatch: pytest.MonkeyPatch, shape_of: Callable[..., AttentionShape]
) -> None:
    told = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", told.append)
    create_attention("auto", shape_of(), 16, torch.bfloat16, CPU)
    assert told == []
    for name in ("gather", "auto"):
        create_attention(name, shape_of(), 16, torch.bfloat16, torch.device("cuda:0"))
    assert told == [False, False]


def test_flash_is_not_used_for_unsupported_shapes(
    monkeypatch: pytest.MonkeyPatch,
    shape_of: Callable[..., AttentionShape],
    paged: Callable[..., Tensor],
) -> None:
    device = fake_cuda(monkeypatch, paged)
    for shape, size, where, why in [
        (shape_of(), PAGE_MULTIPLE, CPU, "CUDA"),
        (shape_of(softcap=50.0), PAGE_MULTIPLE, device, "softcap"),
        (shape_of(sinks=True), PAGE_MULTIPLE, device, "sinks"),
        (shape_of(chunked=True), PAGE_MULTIPLE, device, "chunks"),
        (shape_of(kv_cache_dtype="int8"), PAGE_MULTIPLE, device, "8 bits"),
        (shape_of(), 16, device, "not a multiple of 256"),
    ]:
        assert why in create_checked_flash(shape, size, torch.bfloat16, where)[1]


def test_a_torch_without_a_block_table_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ModuleType("torch.nn.attention.varlen")

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
    ) -> Never:
        raise AssertionError

    older.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, older.__name__, older)
    assert find_kernel() is None
    monkeypatch.setitem(sys.modules, older.__name__, None)
    assert find_kernel() is None


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    return "cuda:0"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_kernel_itself(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    cuda: torch.device,
    dtype: torch.dtype,
    groups: int,
    head_dim: int,
) -> None:
    shape = shape_of(
        groups=groups, head_dim=head_dim, windows=(0, 1, 100, PAGE_MULTIPLE, PAGE_MULTIPLE + 1)
    )
    flash, reason = create_checked_flash(shape, PAGE_MULTIPLE, dtype, torch.device(cuda))
    if flash is None:
        pytest.skip(f"no flash attention here ({reason}); run on a GPU since Ampere, torch >= 2.13")
    edges = [PAGE_MULTIPLE - 2, PAGE_MULTIPLE - 1, PAGE_MULTIPLE, 2 * PAGE_MULTIPLE - 1, 0]
    for mix in (
        [(before, 1) for before in edges],
        [(before, 5) for before in edges],
        [(700, 1), (0, 300), (255, 2)],
    ):
        check(flash, shape, mix, block_size=PAGE_MULTIPLE, dtype=dtype, device=cuda, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("block_size", [16, PAGE_MULTIPLE])
def test_gathering_on_a_gpu(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    cuda: torch.device,
    dtype: torch.dtype,
    softcap: float,
    block_size: int,
) -> None:
    shape = shape_of(groups=4, head_dim=64, windows=(0, 1, 33, 300), softcap=softcap)
    backend = create_attention("gather", shape, block_size, dtype, torch.device(cuda))
    tolerance = 3e-2 if dtype.itemsize == 2 else 2e-3
    for mix in ([(700, 1), (0, 300), (255, 2), (9, 1)], [(255, 1), (256, 1), (0, 1), (257, 1)]):
        check(backend, shape, mix, block_size, dtype, cuda, atol=tolerance)
