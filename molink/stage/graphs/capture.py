"""Captures work on a CUDA device as graphs."""

import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from molink.stage.out_of_memory import is_out_of_memory

#: Something to be done on a device, without arguments or result: it works on fixed memory.
GraphWork = Callable[[], None]

#: Runs of which the quickest is the time of some work: requests wait meanwhile.
_TIMED_RUNS = 2


class GraphCapturer(Protocol):
    """Makes graphs; the tests have one that makes none."""

    @property
    def nbytes(self) -> int:
        """Bytes that the last capture took."""

    def capture_work(self, work: GraphWork, max_bytes: int) -> GraphWork | None:
        """What replays ``work``; ``None`` if that would keep more than ``max_bytes`` beside others.

        Nothing it needs may move, and it may not wait for the device.
        """

    def time_work(self, work: Callable[[], object]) -> float:
        """How long ``work`` takes, from launch to end."""


class CudaGraphCapturer:
    """Captures on one device. All graphs share their memory, so only one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream_for(device)
        self._nbytes = 0
        #: What all graphs have to compute in, one at a time: any of them may use it.
        self._pool_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def capture_work(self, work: GraphWork, max_bytes: int) -> GraphWork | None:
        """See :class:`GraphCapturer`; it is run twice before, so that libraries are ready."""
        self._nbytes = 0
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(here)
            try:
                with torch.cuda.stream(self._stream):
                    work()
                    needed = self._measure_peak_bytes(work)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                needed = None
            finally:
                # If it failed, its memory is about to be used for something else.
                here.wait_stream(self._stream)
                torch.cuda.synchronize(self._device)
                # The capture does so too, and what it frees is not to count.
                torch.cuda.empty_cache()
            if needed is None or needed - self._pool_bytes > max_bytes:
                return None
            free, _ = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the worker may go on using CUDA. A capture that fails would leave
            # its stream in place.
            with (
                torch.cuda.stream(here),
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
        """Bytes that ``work`` has at a time, beside what is there before."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        return torch.cuda.max_memory_allocated(self._device) - before

    def time_work(self, work: Callable[[], object]) -> float:
        """See :class:`GraphCapturer`; the quickest of a few runs after one that takes its
        memory."""
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
    """The same one for all captures: cuBLAS never frees its workspace for a stream."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
