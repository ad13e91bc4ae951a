"""Captures work on a CUDA device as CUDA graphs."""

import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from molink.stage.out_of_memory import is_out_of_memory

#: Device work on fixed memory.
GraphWork = Callable[[], None]

#: The fastest of this many runs counts; requests wait meanwhile.
_TIMED_RUNS = 2


class GraphCapturer(Protocol):
    """Captures graphs; tests use a fake one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the last capture."""

    def capture_work(self, work: GraphWork, max_bytes: int) -> GraphWork | None:
        """Return a replay of ``work``; ``None`` if it would keep more than ``max_bytes``.

        The work's memory must not move, and it must not wait for the device.
        """

    def time_work(self, work: Callable[[], object]) -> float:
        """Measure the seconds of ``work``, from launch to end."""


class CudaGraphCapturer:
    """Captures graphs on one device. They share a memory pool, so only one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream_for(device)
        self._nbytes = 0
        #: Size of the shared pool.
        self._pool_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def capture_work(self, work: GraphWork, max_bytes: int) -> GraphWork | None:
        """See :class:`GraphCapturer`; runs ``work`` twice before, to initialize libraries."""
        self._nbytes = 0
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    work()
                    needed = self._measure_peak_bytes(work)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                needed = None
            finally:
                # After a failure, its memory may be reused at once.
                current.wait_stream(self._stream)
                torch.cuda.synchronize(self._device)
                # The capture also empties the cache, which must not count.
                torch.cuda.empty_cache()
            if needed is None or needed - self._pool_bytes > max_bytes:
                return None
            free, _ = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use CUDA meanwhile. A failed capture would leave its stream as the
            # current one.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                work()
            self._nbytes = free - torch.cuda.mem_get_info(self._device)[0]
            self._pool_bytes += max(0, torch.cuda.memory_reserved(self._device) - reserved)

        def replay() -> None:
            graph.replay()

        return replay

    def _measure_peak_bytes(self, work: GraphWork) -> int:
        """Measure the peak bytes that ``work`` allocates."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        return torch.cuda.max_memory_allocated(self._device) - before

    def time_work(self, work: Callable[[], object]) -> float:
        """See :class:`GraphCapturer`; takes the fastest run after one that allocates memory."""
        work()
        taken = []
        for _ in range(_TIMED_RUNS):
            torch.cuda.synchronize(self._device)
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize(self._device)
            taken.append(time.perf_counter() - begin)
        return min(taken)


@cache
def _stream_for(device: torch.device) -> torch.cuda.Stream:
    """Return the single stream for all captures, since cuBLAS never frees a stream's workspace."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
