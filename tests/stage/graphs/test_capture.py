"""Calls of a capture to CUDA, with a fake; `test_graphs.py` captures on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Never

import pytest
import torch

from molink.stage.graphs import capture
from molink.stage.graphs.capture import CudaGraphCapturer

MIB = 1 << 20


class FakeCuda:
    """Fake streams and memory of a GPU."""

    def __init__(self) -> None:
        self.here = SimpleNamespace(wait_stream=lambda other: self.told.append("wait"))
        self.current = self.here
        self.allocated = self.peak = 3 * MIB
        self.reserved, self.grows = 20 * MIB, 6 * MIB
        self.free = 1000 * MIB
        self.told = []
        self.capturing = False

    def make_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self,
        graph: SimpleNamespace,
        pool: tuple[int, int],
        stream: SimpleNamespace,
        capture_error_mode: str,
    ) -> Iterator[None]:
        # As in torch: not restored if ending the capture fails.
        before, self.current, self.capturing = self.current, stream, True
        try:
            yield
        except RuntimeError:
            raise RuntimeError("CUDA error: capture invalidated") from None
        self.capturing, self.current = False, before
        self.free -= 8 * MIB
        self.reserved += self.grows

    def take(self, nbytes: int) -> None:
        self.peak = max(self.peak, self.allocated + nbytes)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()

    def reset(device: torch.device) -> None:
        fake.peak = fake.allocated

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        yield

    capture._stream_for.cache_clear()
    for name, stand_in in {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": fake.make_stream,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: fake.told.append("replay")),
        "current_stream": lambda device: fake.current,
        "stream": fake.stream,
        "graph": fake.graph,
        "device": on,
        "synchronize": lambda device: fake.told.append("synchronize"),
        "empty_cache": lambda: fake.told.append("empty"),
        "mem_get_info": lambda device: (fake.free, 0),
        "reset_peak_memory_stats": reset,
        "memory_reserved": lambda device: fake.reserved,
        "memory_allocated": lambda device: fake.allocated,
        "max_memory_allocated": lambda device: fake.peak,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield fake
    capture._stream_for.cache_clear()


DEVICE = torch.device("cuda:0")


def test_work_is_captured_after_two_runs(cuda: FakeCuda) -> None:
    captures, runs = CudaGraphCapturer(DEVICE), []
    replay = captures.capture_work(lambda: runs.append(cuda.capturing), 64 * MIB)
    assert runs == [False, False, True]
    assert captures.nbytes == 8 * MIB
    assert replay is not None
    replay()
    assert cuda.told == ["wait", "synchronize", "empty", "replay"]


def test_captures_share_a_stream_and_its_workspaces(cuda: FakeCuda) -> None:
    assert CudaGraphCapturer(DEVICE)._stream is CudaGraphCapturer(DEVICE)._stream


def test_work_that_needs_too_much_is_not_captured(cuda: FakeCuda) -> None:
    def work() -> None:
        cuda.take(65 * MIB)
        assert not cuda.capturing

    captures = CudaGraphCapturer(DEVICE)
    assert captures.capture_work(work, 64 * MIB) is None
    assert captures.capture_work(lambda: cuda.take(64 * MIB), 64 * MIB) is not None


def test_graphs_share_their_memory_pool(cuda: FakeCuda) -> None:
    captures = CudaGraphCapturer(DEVICE)
    assert captures.capture_work(lambda: cuda.take(6 * MIB), 6 * MIB) is not None
    assert captures.capture_work(lambda: cuda.take(9 * MIB), 2 * MIB) is None
    cuda.grows = 2 * MIB
    assert captures.capture_work(lambda: cuda.take(8 * MIB), 2 * MIB) is not None
    assert captures.capture_work(lambda: cuda.take(8 * MIB), 0) is not None
    assert CudaGraphCapturer(DEVICE).capture_work(lambda: cuda.take(MIB), 0) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
    ],
)
def test_work_without_memory_is_not_captured(cuda: FakeCuda, error: Exception) -> None:
    def work() -> Never:
        raise error

    assert CudaGraphCapturer(DEVICE).capture_work(work, 64 * MIB) is None
    assert cuda.told == ["wait", "synchronize", "empty"]
    assert cuda.current is cuda.here


def test_the_quicker_of_two_runs_counts_after_one_that_warms_up(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 5.0, 10.0, 13.0])
    monkeypatch.setattr(capture.time, "perf_counter", lambda: next(clock))
    runs: list[int] = []
    assert CudaGraphCapturer(DEVICE).time_work(lambda: runs.append(len(runs))) == 3.0
    assert runs == [0, 1, 2]


def test_a_capture_that_fails_leaves_no_stream_in_place(cuda: FakeCuda) -> None:
    def work() -> None:
        if cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="invalidated"):
        CudaGraphCapturer(DEVICE).capture_work(work, 64 * MIB)
    assert cuda.current is cuda.here
