"""From an assignment to the worker's first message with its memory plan, or to a failure."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.checkpoint import quantize_check as module
from molink.checkpoint.model_folder import ModelFolder
from molink.facts.device import Device
from molink.facts.settings import PipelineSettings
from molink.wire.messages.instructions import Assign, FormPipeline, StageAddress, Unassign
from molink.wire.messages.peer_reports import StageFailed
from molink.wire.messages.worker_pipe import (
    FormRing,
    LoadStage,
    Ping,
    RingFormed,
    WorkerFailed,
    WorkerLoaded,
)
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.agent.kernel_self_test import KernelResult, SelfTestResult, save_disabled_kernels
from molinkd.peer.agent.stage_manager import StageManager
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings

ASSIGN = Assign(
    pipeline="p1", epoch=1, stage=0, stages=1, layers=(0, 3), model="m", sources=(), dtype="auto"
)
PIPELINE = PipelineSettings(
    max_num_seqs=4, max_num_batched_tokens=64, link_policy="fifo", record="/records"
)
SETTINGS = Settings(name="n", pipeline=PIPELINE, stages_per_host=2)


class FakeStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def fetch_stage(self, *_: Any) -> Path:
        return self.folder


class FakeAddressBook:
    def peer_keys(self) -> None:
        pass


class FakeSupervisor:
    """Starts no process; records the messages that it would start workers with."""

    def __init__(self) -> None:
        self.started: list[LoadStage] = []
        self.prepared = False
        self.spares: list[int] = []
        self.told: list[Any] = []

    def send_to_worker(self, generation: int, message: Any) -> None:
        self.told.append(message)

    def start_worker(self, generation: int, start: LoadStage, keys: Any) -> int:
        self.started.append(start)
        return 1

    def schedule_standby(self, generation: int) -> None:
        self.spares.append(generation)

    def start_standby(self) -> None:
        self.prepared = True

    def drop_standbys(self) -> None:
        self.prepared = False
        self.spares.clear()

    def stop_worker(self, generation: int, *, kill: bool = False) -> None:
        pass

    async def close(self) -> None:
        pass


class Bench:
    """The stage manager of a peer that has the files, with a fake supervisor."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Any] = []
        self.tried: list[int] = []
        store: Any = FakeStore(folder)
        book: Any = FakeAddressBook()
        self.done = asyncio.Event()
        self.assignments = StageManager(
            SETTINGS,
            KeyPair.generate(),
            store,
            book,
            Home(folder),
            self._tell,
            lambda: None,
            lambda *_: None,
            self._reaches,
        )
        self.supervisor = FakeSupervisor()
        self.assignments.supervisor = self.supervisor  # type: ignore[assignment]

    async def _reaches(self, stage: StageAddress) -> bool:
        self.tried.append(stage.port)
        return stage.port != 1

    def _tell(self, message: Any) -> None:
        self.told.append(message)

    async def assign(self, memory: int, kind: str = "cpu", **changes: Any) -> LoadStage | str:
        """The result of an assignment: the worker's first message, or the reason of a failure."""
        device = Device(kind=kind, name="x", memory=memory)  # type: ignore[arg-type]
        self.assignments.set_device(MeasuredDevice(device, bf16=True))
        self.assignments.handle_order(msgspec.structs.replace(ASSIGN, **changes))
        await asyncio.wait([*self.assignments._fetches.values()])
        if self.supervisor.started:
            return self.supervisor.started[0]
        (failed,) = self.told
        assert isinstance(failed, StageFailed)
        return failed.reason


@pytest.fixture(scope="module")
def folder(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_model(tmp_path_factory.mktemp("model"), dtype="bfloat16")
    return made


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[Bench]:
    made = Bench(folder)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(made.assignments.close)
        yield made


async def test_remaining_memory_is_for_the_kv_cache(bench: Bench, folder: Path) -> None:
    start = await bench.assign(1 << 30)
    assert isinstance(start, LoadStage)
    config = ModelFolder.open(folder).config
    # Blocks for four requests of maximum length.
    assert start.kv_bytes == 4 * config.max_model_len * 3 * 2 * 2 * 16 * 2
    assert (start.quantize, start.memory_limit) == ("none", 0)
    assert (start.settings, start.stages_per_host) == (PIPELINE, 2)


async def test_the_first_stage_has_the_draft_model_beside_it(
    bench: Bench, folder: Path, make_model: Any, tmp_path: Path
) -> None:
    draft = make_model(tmp_path / "draft", seed=3)
    preparation = bench.assignments._preparation
    preparation._settings = msgspec.structs.replace(SETTINGS, draft_model=str(draft))
    start = await bench.assign(1 << 27, "cuda")
    assert isinstance(start, LoadStage)
    assert start.draft is not None
    assert start.draft.model_dir == str(draft)
    assert start.draft.kv_bytes > 0
    # Both stages share the memory of the PC.
    assert start.memory_limit == 1 << 27
    assert start.kv_bytes + start.draft.kv_bytes < 1 << 27


@pytest.mark.parametrize("why", ["another stage", "no room", "other tokens"])
async def test_a_stage_without_room_for_a_draft_model_is_unchanged(
    bench: Bench, make_model: Any, tmp_path: Path, why: str
) -> None:
    draft = make_model(tmp_path / "draft", **({"hidden_size": 2048} if why == "no room" else {}))
    if why == "other tokens":
        path = draft / "tokenizer.json"
        path.write_text(path.read_text(encoding="utf-8").replace('"a":', '"aa":'), encoding="utf-8")
    preparation = bench.assignments._preparation
    preparation._settings = msgspec.structs.replace(SETTINGS, draft_model=str(draft))
    other: Any = {"stage": 1, "stages": 2} if why == "another stage" else {}
    start = await bench.assign(40 << 20, "cuda", **other)
    assert isinstance(start, LoadStage)
    assert start.draft is None
    assert start.memory_limit == 40 << 20


async def test_a_lower_max_model_len_takes_less_kv(bench: Bench) -> None:
    start = await bench.assign(1 << 30, max_model_len=64)
    assert isinstance(start, LoadStage)
    assert (start.max_model_len, start.kv_bytes) == (64, 4 * 64 * 3 * 2 * 2 * 16 * 2)


async def test_kernels_that_failed_the_self_test_are_disabled(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = KernelResult(kernel="compiled-rows", dtype="bf16", state="wrong")
    monkeypatch.setattr(Home, "disabled_kernels", folder / "avoid.json")
    save_disabled_kernels(folder / "avoid.json", SelfTestResult(name="x", results=(failed,)))
    start = await bench.assign(1 << 30)
    assert isinstance(start, LoadStage)
    assert start.disabled_kernels == ("compiled-rows",)
    assert start.kernel_checks_path == str(folder / "proofs.json")
    (folder / "avoid.json").unlink()


async def test_a_stage_that_its_kernels_fail_is_planned_without_them(bench: Bench) -> None:
    device = Device(kind="cuda", name="x", memory=1 << 30, has_block_kernels=True, reads_pages=True)
    bench.assignments.set_device(MeasuredDevice(device, bf16=True))
    known: list[Device] = []
    bench.assignments._on_change = lambda: known.append(bench.assignments.device.device)
    starts = []
    for epoch, failed in enumerate((("gguf-blocks",), ("triton-attention",), ()), 1):
        bench.assignments.handle_order(msgspec.structs.replace(ASSIGN, epoch=epoch))
        await asyncio.wait([*bench.assignments._fetches.values()])
        starts.append(bench.supervisor.started.pop())
        if failed:
            known.clear()
            message = WorkerFailed(kind="KernelsFailed", message="no", failed_kernels=failed)
            bench.assignments._on_worker_message(epoch, message)
            # The peer reports its new kernels before the failure.
            facts = known[0].has_block_kernels, known[0].reads_pages
            assert facts == ((False, True) if epoch == 1 else (False, False))
            assert isinstance(bench.told.pop(), StageFailed)
    required = [start.required_kernels for start in starts]
    assert required == [("gguf-blocks", "triton-attention"), ("triton-attention",), ()]


async def test_a_gpu_stage_stays_within_its_budget(bench: Bench) -> None:
    start = await bench.assign(1 << 30, "cuda")
    assert isinstance(start, LoadStage)
    assert start.memory_limit == 1 << 30


async def test_too_small_a_budget_is_rejected_with_numbers(bench: Bench) -> None:
    reason = await bench.assign(600_000)
    assert isinstance(reason, str), reason
    for part in ("layers 1-3 of m need at least ", "weights +", "activations +", "margin +"):
        assert part in reason
    assert "the budget is 600.0 kB: " in reason


async def test_two_stages_share_the_memory_during_a_migration(bench: Bench) -> None:
    first = await bench.assign(1 << 30)
    assert isinstance(first, LoadStage)
    bench.assignments.handle_order(msgspec.structs.replace(ASSIGN, pipeline="p2", epoch=2))
    await asyncio.wait([*bench.assignments._fetches.values()])
    assert [start.pipeline for start in bench.supervisor.started] == ["p1", "p2"]
    assert bench.supervisor.started[1].kv_bytes == first.kv_bytes


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
async def test_a_stage_that_fits_only_alone_is_out_of_memory(bench: Bench, kind: str) -> None:
    first = await bench.assign(1_200_000 if kind == "cpu" else 40_000_000, kind)
    assert isinstance(first, LoadStage), first
    other = msgspec.structs.replace(ASSIGN, pipeline="p2", epoch=2)
    bench.assignments.handle_order(other)
    await asyncio.wait([*bench.assignments._fetches.values()])
    (failed,) = bench.told
    assert failed.out_of_memory
    assert "with another stage loaded: layers 1-3 of m need at least" in failed.reason
    # Once the first stage is gone, the second one fits.
    bench.assignments.handle_order(Unassign(pipeline="p1"))
    bench.assignments.handle_order(msgspec.structs.replace(other, epoch=3))
    await asyncio.wait([*bench.assignments._fetches.values()])
    assert [start.pipeline for start in bench.supervisor.started] == ["p1", "p2"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
async def test_a_reused_worker_releases_its_old_stage(bench: Bench, kind: str) -> None:
    first = await bench.assign(1_200_000 if kind == "cpu" else 40_000_000, kind, stages=2)
    assert isinstance(first, LoadStage), first
    bench.assignments._on_worker_message(1, WorkerLoaded(port=9, max_blocks=10, weight_bytes=1))
    bench.told.clear()
    bench.assignments.handle_order(
        msgspec.structs.replace(ASSIGN, epoch=2, layers=(0, 2), stages=2)
    )
    await asyncio.wait([*bench.assignments._fetches.values()])
    assert bench.told == []
    assert [type(message) for message in bench.supervisor.told] == [Ping, LoadStage]


async def test_a_silent_worker_is_replaced_with_its_next_assignment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker didn't answer an earlier ping, so it gets no more time."""
    assert isinstance(await bench.assign(1 << 30), LoadStage)
    bench.assignments._on_worker_message(1, WorkerLoaded(port=9, max_blocks=10, weight_bytes=1))
    now, agent = bench.assignments._now(), bench.assignments._agent
    monkeypatch.setattr(bench.assignments, "_now", lambda: now)
    for _ in range(6):
        now += 0.5
        bench.assignments._carry_out(agent.check_liveness(now))
    assert bench.supervisor.told == [Ping()]
    bench.assignments.handle_order(msgspec.structs.replace(ASSIGN, epoch=2))
    await asyncio.wait([*bench.assignments._fetches.values()])
    assert len(bench.supervisor.started) == 2


@pytest.mark.parametrize("port", [1, 2])
async def test_a_ring_is_formed_once_the_next_stage_is_reachable(bench: Bench, port: int) -> None:
    start = await bench.assign(1 << 30, stages=2)
    assert isinstance(start, LoadStage)
    loaded = WorkerLoaded(port=9, max_blocks=10, weight_bytes=1)
    bench.assignments._on_worker_message(1, loaded)
    me = bench.assignments._me
    ring = tuple(
        StageAddress(peer=peer, public_key="x" * 40, addresses=("10.0.0.9",), port=at)
        for peer, at in ((me, 9), ("other", port))
    )
    order = FormPipeline(pipeline="p1", epoch=1, ring=ring, blocks=10, micro_batches=0)
    bench.assignments.handle_order(order)
    bench.assignments.handle_order(order)
    await asyncio.wait(bench.assignments._form_tasks)
    assert bench.tried == [port]
    if port == 2:
        assert [type(message) for message in bench.supervisor.told] == [FormRing]
        return
    assert bench.supervisor.told == []
    failed = bench.told[-1]
    assert (failed.stage, failed.next_lost) == (0, True)
    assert "can't reach the next stage at 10.0.0.9 port 1" in failed.reason


async def test_quantize_reaches_the_worker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    start = await bench.assign(1 << 30, quantize="nf4", kv_cache_dtype="int8")
    assert isinstance(start, LoadStage)
    assert (start.quantize, start.kv_cache_dtype) == ("nf4", "int8")


async def test_missing_bitsandbytes_is_reported_with_a_fix(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    reason = await bench.assign(8 << 30, "cuda", quantize="int8")
    assert isinstance(reason, str)
    assert "int8 weights need bitsandbytes" in reason
    assert "molink setup" in reason


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_standby_worker_is_kept_before_and_beside_a_stage(
    bench: Bench, wanted: bool
) -> None:
    settings = msgspec.structs.replace(SETTINGS, standby_worker=wanted)
    bench.assignments._settings = settings
    await bench.assign(1 << 30)
    bench.assignments._on_worker_message(1, WorkerLoaded(port=1, max_blocks=1, weight_bytes=1))
    assert bench.supervisor.prepared == wanted
    assert bench.supervisor.spares == []
    bench.assignments._on_worker_message(1, RingFormed(epoch=1))
    assert bench.supervisor.spares == ([1] if wanted else [])


async def test_a_paused_pc_has_no_standby_worker(bench: Bench) -> None:
    await bench.assign(1 << 30)
    bench.assignments._on_worker_message(1, WorkerLoaded(port=1, max_blocks=1, weight_bytes=1))
    bench.assignments.set_paused(True)
    assert not bench.supervisor.prepared
    bench.assignments._on_worker_message(1, RingFormed(epoch=1))
    assert bench.supervisor.spares == []
    bench.assignments.set_paused(False)
    assert bench.supervisor.prepared


async def test_a_pc_that_starts_paused_has_no_standby_worker(bench: Bench) -> None:
    bench.assignments.set_paused(True)
    bench.assignments.set_device(MeasuredDevice(Device(kind="cpu", name="x", memory=1), bf16=True))
    assert not bench.supervisor.prepared
    bench.assignments.set_paused(False)
    assert bench.supervisor.prepared


async def test_only_a_recovery_skips_optional_work(bench: Bench) -> None:
    start = await bench.assign(1 << 30)
    assert isinstance(start, LoadStage)
    assert not start.skip_optional
    bench.assignments._on_worker_exit(1, "it was killed")
    bench.assignments.handle_order(msgspec.structs.replace(ASSIGN, epoch=2))
    await asyncio.wait([*bench.assignments._fetches.values()])
    assert bench.supervisor.started[1].skip_optional
