"""Real stages in a ring without processes: answers do not depend on swapping."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.settings import PreemptionMode
from molink.ring.ring_measurements import HostMemory
from molink.ring.step import BlockCopy, StepInput, StepResult
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.request_state import RequestState
from molink.sim.event_queue import EventQueue
from molink.stage.stage import Stage
from molink.wire.messages.data_plane import Admit, SamplingParams
from molink.wire.messages.serving import OutputToken, Rejected
from molinkd.worker.executor import StageExecutor
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step
from tests.support.request_states import make_state
from tests.support.rings import Stages, VirtualRing, WholeLink

STAGES, BLOCKS, FEW, BLOCK_SIZE, ANSWER = ((0, 2), (2, 3)), 96, 12, 4, 16
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "penalties": SamplingParams(
        temperature=0.5, seed=7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4
    ),
}


@dataclass
class Computes:
    """A stage and its requests; steps and copies take no time."""

    queue: EventQueue
    stage: Stage
    requests: RequestTable
    copies: list[BlockCopy] = field(default_factory=list)

    def submit_step(
        self, segments: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        results = run_step(self.stage, self.requests, segments)
        self.queue.schedule_at(self.queue.now + 0.01, done, StepResult(results, 0.01, None))

    def submit_copy(self, copy: BlockCopy) -> None:
        self.copies.append(copy)
        self.stage.swap_blocks(out=copy.is_swap_out, blocks=copy.blocks, hosts=copy.host_blocks)


@pytest.fixture(scope="module")
def stages(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Stage]:
    torch.set_num_threads(1)
    folder = ModelFolder.open(make_model(tmp_path_factory.mktemp("swapping")))
    return [Stage.load_layers(folder, layers, "cpu", "f32") for layers in STAGES]


def requests() -> list[RequestState]:
    rng, found = random.Random(3), []
    for name, sampling in SAMPLINGS.items():
        for index, length in enumerate((3, 17, 8, 22)):
            prompt = tuple(rng.randrange(256) for _ in range(length))
            key = f"{name} {index}"
            found.append(make_state("d", key, prompt, length, ANSWER, sampling, (11,), 1 << 20))
    return found


def serve(
    stages: Sequence[Stage],
    asked: Sequence[RequestState],
    policy: str = "fcfs",
    host_blocks: int = 64,
    until: Callable[[VirtualRing], bool] | None = None,
    **limits: Any,
) -> tuple[dict[str, list[OutputToken | Rejected]], VirtualRing, list[Computes]]:
    """Serve until all requests end or ``until`` holds; returns answers, ring and stages."""
    queue, tables = EventQueue(), [RequestTable() for _ in stages]
    given = {"block_size": BLOCK_SIZE, "micro_batches": 2, "max_num_batched_tokens": 16}
    bounds = SchedulerConfig(**{"num_blocks": BLOCKS, "prefix_cache": False, **given, **limits})
    rooms = []
    for stage in stages:
        stage.allocate_kv_pool(bounds.num_blocks, BLOCK_SIZE)
        rooms.append(HostMemory(*stage.open_host_pool(host_blocks * stage.block_bytes(BLOCK_SIZE))))
    assert [room.blocks for room in rooms] == [host_blocks] * len(stages)
    computing = [Computes(queue, *pair) for pair in zip(stages, tables, strict=True)]
    ring = VirtualRing(
        bounds,
        computing,
        [WholeLink(queue) for _ in stages],
        Stages(
            stages[0].config.hidden_size,
            stages[0].config.vocab_size,
            "f32",
            host=HostMemory(host_blocks, 0.0),
            scheduling_policy=policy,
        ),
        lambda index: tables[index],
        queue,
    )
    found: dict[str, list[OutputToken | Rejected]] = {}
    ring.on_emission = lambda emission, _: found.setdefault(emission.message.key, []).append(
        emission.message
    )
    queue.run(1.0)  # each stage has told the others of its host memory
    for at, request in enumerate(asked):
        queue.schedule_at(1.0 + 0.01 * at, ring.scheduler.submit_request, request, 1.0 + 0.01 * at)
        queue.schedule_at(1.0 + 0.01 * at, ring.rings[0].run_pending)
    if until is not None:
        ring.run_until(lambda: until(ring))
        return found, ring, computing
    ring.run_until(lambda: len(found) == len(asked) and not ring.scheduler.live_requests)
    queue.run(queue.now + 1.0)
    ring.check_idle()
    return found, ring, computing


@pytest.fixture(scope="module")
def plenty(stages: Sequence[Stage]) -> dict[str, list[int]]:
    """The answers with blocks for all requests at once."""
    return texts(serve(stages, requests())[0])


def texts(found: dict[str, list[OutputToken | Rejected]]) -> dict[str, list[int]]:
    return {key: [each.token for each in told] for key, told in found.items()}


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("reactive-swap", "fcfs"),
        ("proactive-swap", "fcfs"),
        ("proactive-swap", "skip-join-mlfq"),
        ("proactive-swap", "gittins"),
    ],
)
def test_swaps_change_no_answer(
    stages: Sequence[Stage],
    plenty: dict[str, list[int]],
    mode: PreemptionMode,
    policy: str,
    prefix_cache: bool,
) -> None:
    few = {"num_blocks": FEW, "prefix_cache": prefix_cache, "preemption_mode": mode}
    found, ring, computing = serve(stages, requests(), policy, **few)
    assert texts(found) == plenty
    counters, gauges = ring.scheduler.collect_stats()
    assert counters["scheduler_swaps_out_total"] >= 2
    assert counters["scheduler_swaps_in_total"] >= 2
    assert gauges["scheduler_host_blocks"] == 64
    assert gauges["scheduler_host_blocks_used"] == 0
    # Every stage has copied the same blocks, in the same order.
    assert computing[0].copies == computing[1].copies
    assert (
        sum(copy.is_swap_out for copy in computing[0].copies)
        == counters["scheduler_swaps_out_total"]
    )


def test_preemption_without_host_memory_recomputes(
    stages: Sequence[Stage], plenty: dict[str, list[int]]
) -> None:
    few: Any = {"num_blocks": FEW, "preemption_mode": "reactive-swap", "host_blocks": 2}
    found, ring, _ = serve(stages, requests(), **few)
    assert texts(found) == plenty
    counters, _ = ring.scheduler.collect_stats()
    assert counters["scheduler_swap_fallbacks_total"] >= 1


def test_stages_of_one_pc_share_the_memory_that_is_free(
    stages: Sequence[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stages[0]
    stage.allocate_kv_pool(4, BLOCK_SIZE)
    each = stage.block_bytes(BLOCK_SIZE)
    free = SimpleNamespace(available=24 * each)
    monkeypatch.setattr("molink.stage.stage.psutil.virtual_memory", lambda: free)
    blocks = [
        stage.open_host_pool(*requested)[0]
        for requested in ((99 * each,), (99 * each, 3), (each, 3))
    ]
    assert blocks == [12, 4, 1]


def test_a_failed_swap_in_fails_its_request(stages: Sequence[Stage]) -> None:
    stage, table = stages[0], RequestTable()
    stage.allocate_kv_pool(4, BLOCK_SIZE)
    stage.open_host_pool(4 * stage.block_bytes(BLOCK_SIZE))
    executor = StageExecutor(stage, table, lambda *_: None)
    table.admit_request(Admit(1, 0, SAMPLINGS["greedy"], 3))
    executor.submit_copy(BlockCopy(0, False, (1,), (2,)))  # nothing was copied there
    executor.close()
    assert table[0].failed


def test_swapped_requests_are_replayed_after_a_lost_stage(
    stages: Sequence[Stage], plenty: dict[str, list[int]]
) -> None:
    """A new ring's host memory is empty: all requests are submitted again, as daemons do."""
    few: Any = {"num_blocks": FEW, "preemption_mode": "reactive-swap"}
    requested = requests()

    def lost(ring: VirtualRing) -> bool:
        return ring.scheduler.collect_stats()[1]["scheduler_swapped"] >= 1

    before, ring, _ = serve(stages, requested, until=lost, **few)
    swapped = {job.key for job in ring.scheduler._queues if job.host_copy is not None}
    assert swapped
    assert {("d", key) for key in swapped} <= set(ring.scheduler.live_requests)
    left = []
    for state in requests():
        told = texts(before).get(state.key, [])
        if ("d", state.key) in ring.scheduler.live_requests:
            left.append(
                RequestState.from_request(
                    state.request, "d", state.key, told, credit_window=1 << 20
                )
            )
    after, _, _ = serve(stages, left, **few)
    together = {key: texts(before).get(key, []) + texts(after).get(key, []) for key in plenty}
    assert together == plenty
