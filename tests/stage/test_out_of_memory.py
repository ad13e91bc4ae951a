"""A process's share of a GPU, and which errors count as out of memory."""

from types import SimpleNamespace

import pytest
import torch

from molink.stage.out_of_memory import empty_device_cache, is_out_of_memory, limit_memory

GIB = 1 << 30


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Memory fractions that are set on a machine with one GPU of 8 GiB."""
    asked: list[tuple[float, int]] = []
    gpu = SimpleNamespace(total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: asked.append(given)
    )
    return asked


def test_the_budget_is_enforced_as_a_fraction(limits: list[tuple[float, int]]) -> None:
    limit_memory("cuda:0", 6 * GIB)
    limit_memory("cuda", 12 * GIB)
    assert limits == [(0.75, 0), (1.0, 0)]


@pytest.mark.parametrize(("device", "nbytes"), [("cpu", GIB), ("cuda:0", 0), ("cuda:1", GIB)])
def test_no_limit_without_a_gpu(limits: list[tuple[float, int]], device: str, nbytes: int) -> None:
    limit_memory(device, nbytes)
    assert limits == []


def test_other_errors_are_not_out_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    # The error of a GPU without room for a library's own memory.
    status = "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(f"CUDA error: {status}"))


def test_emptying_the_cache_does_not_start_cuda() -> None:
    """A CUDA context takes hundreds of MB, which a CPU stage must not use."""
    started = torch.cuda.is_initialized()
    empty_device_cache()
    assert torch.cuda.is_initialized() == started


@pytest.mark.gpu
def test_a_gpu_refuses_what_is_over_the_budget() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    empty_device_cache()  # the cache of earlier tests would have room for these allocations
    before = torch.cuda.memory_reserved(0)
    limit_memory("cuda:0", before + (64 << 20))
    try:
        fits = torch.empty(32 << 20, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda:0")
        assert is_out_of_memory(caught.value)
        del fits
        empty_device_cache()
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
