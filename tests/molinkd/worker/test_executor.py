"""The compute thread with a stage that runs out of memory."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.ring.step import BlockCopy, StepInput, StepResult
from molink.stage.stage import Stage
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import Admit, RequestSlice, SamplingParams, Volume
from molinkd.worker import executor as module
from molinkd.worker.executor import StageExecutor
from molinkd.worker.request_table import RequestTable

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class HungryStage:
    """A stage on which some steps run out of memory; handling the error may allocate nothing."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.error: Exception | None = None
        self.freed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def compute_step(self, batch: Any, between_layers: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        return self._stage.compute_step(batch, between_layers)


@pytest.fixture(scope="module")
def folder(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    torch.set_num_threads(1)
    return ModelFolder.open(make_model(tmp_path_factory.mktemp("executor")))


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    monkeypatch.setattr(module, "empty_device_cache", lambda: calls.append(1))
    return calls


def load(folder: ModelFolder, layers: tuple[int, int]) -> Any:
    stage = Stage.load_layers(folder, layers, "cpu", "f32")
    stage.allocate_kv_pool(8, 4)
    return HungryStage(stage)


def step(stage: Any, data: Any, requests: RequestTable) -> StepResult:
    done: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    executor = StageExecutor(stage, requests, lambda function, result: function(result))
    volume = Volume(9, True, (RequestSlice(0, 0, 2, 1, (0,), True),), Payload("i32", (2,)))
    executor.submit_step([StepInput(volume, data)], done.put)
    executor.close()
    return done.get_nowait()


class InterruptingStage:
    """A stage that calls ``interrupt`` after the first layer of the first pass."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.interrupt: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def compute_step(self, batch: Any, between_layers: Callable[[], None] | None = None) -> Any:
        def interrupted() -> None:
            assert between_layers is not None
            if self.interrupt is not None:
                interrupt, self.interrupt = self.interrupt, None
                interrupt()
            between_layers()

        return self._stage.compute_step(batch, between_layers and interrupted)


def chunk_and_decode() -> tuple[StepInput, StepInput]:
    chunk = Volume(9, True, (RequestSlice(0, 0, 6, 1, (0, 1)),), Payload("i32", (6,)))
    decode = Volume(8, False, (RequestSlice(1, 0, 1, 1, (2,)),), Payload("i32", (1,)))
    return StepInput(chunk, [1, 2, 3, 4, 5, 6]), StepInput(decode, [7])


def run_both(folder: ModelFolder, *, interrupts: bool, closes: bool = False) -> list[StepResult]:
    """Results of a chunk and of decode rows, in the order in which they came."""
    stage = InterruptingStage(Stage.load_layers(folder, (0, 2), "cpu", "f32"))
    stage.allocate_kv_pool(8, 4)
    requests = table()
    for number in (1, 2):
        requests.admit_request(Admit(1 + number, number, SamplingParams(), 2))
    executor = StageExecutor(stage, requests, lambda function, result: function(result))
    ended: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    chunk, decode = chunk_and_decode()

    def interrupt() -> None:
        executor.submit_copy(BlockCopy(2, True, (5,), (0,)))  # fails without host memory
        executor.submit_step([decode], ended.put)
        if closes:
            executor._jobs.put(None)

    stage.interrupt = interrupt if interrupts else None
    began = time.perf_counter()
    executor.submit_step([chunk], ended.put)
    results = [ended.get(timeout=30)]
    if not interrupts:
        executor.submit_step([decode], ended.put)
    results.append(ended.get(timeout=30))
    if closes:
        executor._thread.join(timeout=30)
        assert not executor._thread.is_alive()
    else:
        executor.close()
    took = time.perf_counter() - began
    assert sum(done.seconds for done in results) <= took, "no second counts for both"
    assert requests[2].failed is interrupts
    return results


@pytest.mark.parametrize("closes", [False, True])
def test_steps_queued_during_a_chunk_run_between_its_layers(
    folder: ModelFolder, closes: bool
) -> None:
    chunk, decode = run_both(folder, interrupts=False)
    decode_within, chunk_around = run_both(folder, interrupts=True, closes=closes)
    assert decode_within.outputs[0].volume.seq == 8
    assert torch.equal(rows_of(chunk_around), rows_of(chunk))
    assert torch.equal(rows_of(decode_within), rows_of(decode))


class PreparingStage:
    """A stage with ``wanted`` graphs to capture, the first of which may fail."""

    def __init__(self, wanted: int, fails: bool) -> None:
        self.wanted, self.fails = wanted, fails
        self.made = 0
        self.tried = threading.Event()

    def capture_next_graph(self) -> bool:
        self.made += 1
        self.wanted -= 1
        if self.wanted <= 0:
            self.tried.set()
        if self.fails:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.wanted > 0


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_stage_captures_graphs_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(module, "IDLE_BEFORE_CAPTURE_S", 0.01)
    stage: Any = PreparingStage(1 if fails else 3, fails)
    executor = StageExecutor(stage, table(), lambda function, result: function(result))
    assert stage.tried.wait(30)
    done: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    executor.submit_step([], done.put)  # fails on this fake stage, but the thread survives
    assert done.get(timeout=30).error is not None
    executor.close()
    assert stage.made in ((1, 2) if fails else (3, 4))  # one attempt more after the step


def test_a_busy_stage_captures_no_graphs() -> None:
    stage: Any = PreparingStage(3, False)
    executor = StageExecutor(stage, table(), lambda function, result: function(result))
    done: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    for _ in range(5):
        executor.submit_step([], done.put)
    executor.close()
    assert stage.made == 0


def table() -> RequestTable:
    requests = RequestTable()
    requests.admit_request(Admit(1, 0, SamplingParams(temperature=0.0), 2))
    return requests


def rows_of(done: StepResult) -> torch.Tensor:
    (result,) = done.outputs
    assert result.rows is not None
    return torch.frombuffer(result.rows, dtype=torch.float32)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (NO_MEMORY, True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_a_failed_step_fails_its_rows_and_reports_out_of_memory(
    folder: ModelFolder, freed: list[int], error: Exception, memory: bool
) -> None:
    stage = load(folder, (0, 1))
    stage.error = error
    done = step(stage, [1, 2], table())
    assert done.out_of_memory is memory
    assert freed == [1] * memory
    assert done.error is not None
    assert rows_of(done).isnan().all()


def test_the_last_stage_reports_failed_requests(folder: ModelFolder, freed: list[int]) -> None:
    stage = load(folder, (1, 3))
    stage.error = NO_MEMORY
    done = step(stage, bytearray(2 * 64 * 4), table())
    (result,) = done.outputs
    assert result.sampled is not None
    assert result.sampled.failed == (0,)
    assert result.sampled.sampled == ()


def test_a_failed_step_allocates_nothing_on_the_device(
    folder: ModelFolder, freed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is full, so the error is reported from host memory."""
    stage = load(folder, (1, 3))
    stage.error, stage.device = NO_MEMORY, torch.device("meta")
    done = step(stage, bytearray(2 * 64 * 4), table())
    assert done.outputs


def test_the_step_after_a_failed_one_gives_the_usual_result(
    folder: ModelFolder, freed: list[int]
) -> None:
    stage = load(folder, (0, 1))
    expected = rows_of(step(stage, [1, 2], table())).clone()
    stage.error = NO_MEMORY
    step(stage, [1, 2], table())
    stage.error = None
    done = step(stage, [1, 2], table())
    assert not done.out_of_memory
    assert torch.equal(rows_of(done), expected)
