"""A worker with a fake stage: what it reports to its daemon, above all failures."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import molinkd.worker.engine_loader
import molinkd.worker.worker
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import KernelsFailed, MolinkError
from molink.facts.identity import derive_peer_id
from molink.facts.profile import Profile
from molink.facts.settings import PipelineSettings
from molink.ring.ring_measurements import NO_HOST_MEMORY, HostMemory
from molink.scheduler.policies.answer_lengths import AnswerLengths
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.worker_pipe import (
    FormRing,
    LoadStage,
    PeerBlocked,
    PeerKey,
    PeerKeys,
    RingFormed,
    WorkerFailed,
    WorkerLoaded,
    WorkerStats,
)
from molink.wire.sockets.create_socket import create_client
from molink.wire.sockets.key_pair import KeyPair
from molinkd.worker.engine_loader import load_engine
from molinkd.worker.stage_runtime import StageRuntime
from molinkd.worker.worker import Worker, _open_host_pool
from tests.support.models import MakeModel

KEYS, PREVIOUS = KeyPair.generate(), KeyPair.generate()
PROFILE = Profile(decode=((1, 0.1),), prefill=((16, 0.2),))
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class FakePipe:
    """A fake daemon: sends orders and records reports."""

    def __init__(self) -> None:
        self.order: Callable[[Any], None] = print
        self.heard: list[Any] = []
        self.listening = asyncio.Event()

    def start_listening(self, loop: Any, handle: Callable[[Any], None]) -> None:
        self.order = handle
        self.listening.set()

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


class FakeStage:
    """The second of two stages."""

    is_first, is_last = False, True
    config = SimpleNamespace(
        hidden_size=8,
        max_model_len=64,
        vocab_size=10,
        keys_depend_on_length=False,
        keeps_states=False,
        short_context=0,
        adapters=(),
        vision=None,
        has_output_head=False,
    )
    dtype = wire_dtype = "f32"
    weight_bytes = 3 << 20
    host_expert_bytes = 0
    resident_share = 0.0

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.allocated = 0

    def block_bytes(self, size: int) -> int:
        return 1 << 20

    def count_blocks(self, nbytes: int, size: int) -> int:
        return nbytes // self.block_bytes(size)

    def pool_bytes(self, blocks: int, size: int) -> int:
        return blocks * self.block_bytes(size)

    def allocate_kv_pool(self, blocks: int, size: int) -> None:
        self.allocated += 1
        if self.error is not None:
            raise self.error


def test_host_memory_is_taken_only_where_it_is_to_be_used() -> None:
    requested: list[tuple[int, int]] = []

    def open_host_pool(nbytes: int, stages_per_host: int) -> tuple[int, float]:
        requested.append((nbytes, stages_per_host))
        return 7, 0.002

    stage: Any = SimpleNamespace(open_host_pool=open_host_pool)
    for settings in ({}, {"preemption_mode": "reactive-swap", "swap_space": 0}):
        command = msgspec.structs.replace(start(), settings=PipelineSettings(**settings))
        assert _open_host_pool(stage, command) == NO_HOST_MEMORY
    settings = PipelineSettings(preemption_mode="reactive-swap", swap_space=900)
    command = msgspec.structs.replace(start(), settings=settings, stages_per_host=3)
    assert _open_host_pool(stage, command) == HostMemory(7, 0.002)
    assert requested == [(900, 3)]


def start() -> LoadStage:
    return LoadStage(
        pipeline="p1",
        stage=1,
        stages=2,
        layers=(2, 4),
        model_dir="nowhere",
        dtype="f32",
        device="cpu",
        threads=1,
        public_key=KEYS.public,
        secret_key=KEYS.secret,
        bind="127.0.0.1",
        ports=(20000, 65000),
        kv_bytes=16 << 20,
        block_size=4,
        max_model_len=64,
    )


def ring(epoch: int) -> FormRing:
    stages = tuple(
        StageAddress(
            peer=derive_peer_id(keys.public),
            public_key=keys.public,
            addresses=("127.0.0.1",),
            port=1,
        )
        for keys in (PREVIOUS, KEYS)
    )
    return FormRing(epoch=epoch, ring=stages, blocks=7, micro_batches=2)


def members(*keys: KeyPair) -> PeerKeys:
    return PeerKeys(
        peers=tuple(PeerKey(peer=derive_peer_id(key.public), public_key=key.public) for key in keys)
    )


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]
) -> AsyncIterator[tuple[FakePipe, Worker, "asyncio.Task[None]"]]:
    monkeypatch.setattr(molinkd.worker.engine_loader, "_load_stage", load)
    monkeypatch.setattr(molinkd.worker.engine_loader, "profile_stage", lambda *_, **__: PROFILE)
    pipe: Any = FakePipe()
    worker = Worker(start(), pipe, load_engine)
    task = asyncio.create_task(worker.run())
    try:
        await pipe.listening.wait()
        yield pipe, worker, task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_running_out_of_memory_while_loading_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: Any) -> Any:
        raise NO_MEMORY

    async with running(monkeypatch, load) as (pipe, _, task):
        with pytest.raises(MolinkError):
            await task
    (failed,) = pipe.heard
    assert failed.kind == "WorkerError"
    assert failed.message.startswith("layers 3-4 can't run on cpu: OutOfMemoryError: CUDA out of")


def test_memory_is_bounded_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = molinkd.worker.engine_loader
    done: list[Any] = []
    folder = SimpleNamespace(config=SimpleNamespace(max_model_len=64))
    monkeypatch.setattr(module.ModelFolder, "open", lambda *_: folder)
    monkeypatch.setattr(module, "limit_memory", lambda *given: done.append(given))
    monkeypatch.setattr(
        module.Stage,
        "load_layers",
        lambda *given, on_layer, **more: done.append((*given[1:], more)),
    )
    settings = msgspec.structs.replace(start().settings, max_num_seqs=200)
    command = msgspec.structs.replace(
        start(),
        device="cuda:1",
        memory_limit=8 << 30,
        quantize="nf4",
        kv_cache_dtype="int8",
        disabled_kernels=("int8",),
        settings=settings,
    )
    module._load_stage(command, print)
    expected = {
        "quantize": "nf4",
        "held": None,
        "disabled_kernels": ("int8",),
        "max_decode_rows": 200,
        "kv_cache_dtype": "int8",
        "host_experts": 0,
        "host_disabled_kernels": ("int8",),
    }
    assert done == [
        ("cuda:1", 8 << 30),
        ((2, 4), "cuda:1", "f32", expected),
    ]


def test_loading_progress_is_reported(make_model: MakeModel, tmp_path: Path) -> None:
    model = ModelFolder.open(make_model(tmp_path / "model"))
    told: list[tuple[int, int]] = []
    command = msgspec.structs.replace(start(), model_dir=str(model.path), layers=(0, 2))
    molinkd.worker.engine_loader._load_stage(command, lambda *bytes: told.append(bytes))
    total = sum(model.tensors[name].nbytes for name in model.stage_tensors(0, 2))
    assert told == [(0, total), (total // 2, total), (total, total)]


def test_kernels_are_tried_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = molinkd.worker.engine_loader
    done: list[Any] = []
    folder = SimpleNamespace(config=SimpleNamespace(max_model_len=64))
    monkeypatch.setattr(module.ModelFolder, "open", lambda *_: folder)

    def prove(*given: Any) -> tuple[str, ...]:
        done.append(given)
        return ("int8", "compiled-rows")

    monkeypatch.setattr(module, "check_kernels", prove)
    monkeypatch.setattr(
        module.Stage, "load_layers", lambda *_, **more: done.append(more["disabled_kernels"])
    )
    path = tmp_path / "proofs.json"
    command = msgspec.structs.replace(
        start(), quantize="int8", disabled_kernels=("compiled-rows",), kernel_checks_path=str(path)
    )
    module._load_stage(command, print)
    given = (path, folder, torch.device("cpu"), "f32", "int8", 4, ("compiled-rows",))
    assert done == [given, ("int8", "compiled-rows")]


@pytest.mark.parametrize(
    ("disabled", "passes", "reads_pages", "failed"),
    [
        ((), True, True, ()),
        (("gguf-blocks",), True, True, ("gguf-blocks",)),
        ((), False, True, ("gguf-blocks",)),
        ((), True, False, ("triton-attention",)),
    ],
)
@pytest.mark.parametrize("required", [True, False])
def test_a_stage_that_needs_more_memory_than_planned_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    disabled: tuple[str, ...],
    passes: bool,
    reads_pages: bool,
    failed: tuple[str, ...],
    required: bool,
) -> None:
    module = molinkd.worker.engine_loader
    loaded: list[Any] = []

    def load(*_: Any, **__: Any) -> Any:
        loaded.append(1)
        return SimpleNamespace(reads_pages=lambda size: reads_pages and size == 4)

    folder = SimpleNamespace(config=SimpleNamespace(max_model_len=64, dtype="bf16"), tensors={})
    monkeypatch.setattr(module.ModelFolder, "open", lambda *_: folder)
    monkeypatch.setattr(module, "limit_memory", lambda *_: None)
    monkeypatch.setattr(module, "find_device", torch.device)
    monkeypatch.setattr(module, "find_planes", lambda *_: ())
    monkeypatch.setattr(module, "check_all_planes", lambda *_: passes)
    monkeypatch.setattr(module.Stage, "load_layers", load)
    kernels = ("gguf-blocks", "triton-attention")
    command = msgspec.structs.replace(
        start(),
        device="cuda:0",
        disabled_kernels=disabled,
        required_kernels=kernels if required else (),
    )
    if not (failed and required):
        module._load_stage(command, print)
        return
    with pytest.raises(KernelsFailed, match=failed[0]) as raised:
        module._load_stage(command, print)
    assert raised.value.kernels == failed
    # Weights that would take too much memory are not loaded.
    assert bool(loaded) is (failed != ("gguf-blocks",))


async def test_kernels_that_fail_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> FakeStage:
        raise KernelsFailed(("gguf-blocks",))

    async with running(monkeypatch, load) as (pipe, _, task):
        with pytest.raises(KernelsFailed):
            await task
    (told,) = pipe.said(WorkerFailed)
    assert (told.kind, told.failed_kernels) == ("KernelsFailed", ("gguf-blocks",))


async def test_running_out_of_memory_for_blocks_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch, lambda *_: FakeStage(NO_MEMORY)) as (pipe, _, task):
        pipe.order(ring(1))
        with pytest.raises(MolinkError):
            await task
    (failed,) = pipe.said(WorkerFailed)
    assert "no memory on cpu for 7 KV blocks (7 MiB) besides 3 MiB of weights" in failed.message
    assert pipe.said(RingFormed) == []


async def test_a_repeated_command_is_answered_again(
    monkeypatch: pytest.MonkeyPatch, net: Any
) -> None:
    stage, learned = FakeStage(), list[object]()

    class Listening(StageRuntime):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            learned.append(given[-1])

    monkeypatch.setattr(molinkd.worker.worker, "StageRuntime", Listening)
    async with running(monkeypatch, lambda *_: stage) as (pipe, _, _task):
        for epoch in (3, 3, 2, 4):
            pipe.order(ring(epoch))
        await net.until(lambda: len(pipe.said(RingFormed)) == 3)
    assert [formed.epoch for formed in pipe.said(RingFormed)] == [3, 3, 4]
    assert stage.allocated == 2
    # All schedulers of the worker share the learned answer lengths.
    first, second = learned
    assert isinstance(first, AnswerLengths)
    assert first is second


async def test_a_blocked_previous_stage_is_reported_with_every_ring(
    monkeypatch: pytest.MonkeyPatch, net: Any
) -> None:
    async with running(monkeypatch, lambda *_: FakeStage()) as (pipe, worker, _):
        pipe.order(members(PREVIOUS))
        pipe.order(ring(1))
        await net.until(lambda: pipe.said(RingFormed))
        address = f"tcp://127.0.0.1:{pipe.said(WorkerLoaded)[0].port}"
        with create_client(net.context, PREVIOUS, KEYS.public, address) as socket:
            for _ in range(20):
                await socket.send_multipart([b"not", b"a", b"message"])
            await net.until(lambda: pipe.said(PeerBlocked))
        pipe.order(ring(2))
        await net.until(lambda: len(pipe.said(PeerBlocked)) == 2)
        await net.until(
            lambda: any(
                stats.counters["members_blocked_total"] == 1 for stats in pipe.said(WorkerStats)
            )
        )
        # A peer that was removed and admitted again may connect again.
        for command in (members(), members(PREVIOUS), ring(3)):
            pipe.order(command)
        await net.until(lambda: len(pipe.said(RingFormed)) == 3)
        assert derive_peer_id(PREVIOUS.public) in worker._authenticator.peers
    first, second = pipe.said(PeerBlocked)
    assert (first.peer, first.is_previous_stage) == (derive_peer_id(PREVIOUS.public), True)
    assert "parts" in first.reason
    assert (first.epoch, second.epoch, second.reason) == (1, 2, first.reason)
