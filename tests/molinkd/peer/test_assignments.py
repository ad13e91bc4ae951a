"""From an assignment to a worker's first message: its memory plan, or why there is none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.checkpoint.folder import ModelFolder
from molink.facts.device import Device
from molink.facts.settings import PipelineSettings
from molink.wire.messages.control import Assign, StageFailed
from molink.wire.messages.pipe import Start
from molink.wire.sockets.curve import KeyPair
from molinkd.peer import quantize as module
from molinkd.peer.assignments import Assignments
from molinkd.peer.device_probe import Measured
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings

ASSIGN = Assign(
    pipeline="p1", epoch=1, stage=0, stages=1, layers=(0, 3), model="m", sources=(), dtype="auto"
)
PIPELINE = PipelineSettings(max_running=4, chunk_tokens=64, link_policy="fifo", record="/records")
SETTINGS = Settings(name="n", pipeline=PIPELINE)


class FakeStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def stage(self, *_: Any) -> Path:
        return self.folder


class FakeAddressBook:
    def keys(self) -> None:
        pass


class FakeSupervisor:
    """Starts nothing, and keeps what it should have started."""

    def __init__(self) -> None:
        self.started: list[Start] = []

    def start(self, generation: int, start: Start, keys: Any) -> int:
        self.started.append(start)
        return 1

    def stop(self, generation: int) -> None:
        pass

    async def close(self) -> None:
        pass


class Bench:
    """The assignments of a peer, with files but without processes."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Any] = []
        store: Any = FakeStore(folder)
        book: Any = FakeAddressBook()
        self.done = asyncio.Event()
        self.assignments = Assignments(
            SETTINGS,
            KeyPair.generate(),
            store,
            book,
            Home(folder),
            self._tell,
            lambda: None,
            lambda *_: None,
        )
        self.supervisor = FakeSupervisor()
        self.assignments.supervisor = self.supervisor  # type: ignore[assignment]

    def _tell(self, message: Any) -> None:
        self.told.append(message)

    async def assign(self, memory: int, kind: str = "cpu", **changes: Any) -> Start | str:
        """What comes of an assignment: the worker's first message, or the reason of a failure."""
        device = Device(kind=kind, name="x", memory=memory)  # type: ignore[arg-type]
        self.assignments.measured(Measured(device, bf16=True))
        self.assignments.handle(msgspec.structs.replace(ASSIGN, **changes))
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


async def test_the_rest_is_for_kv(bench: Bench, folder: Path) -> None:
    start = await bench.assign(1 << 30)
    assert isinstance(start, Start)
    config = ModelFolder.open(folder).config
    # As many blocks as four requests of the model's whole context can use.
    assert start.kv_bytes == 4 * config.context * 3 * 2 * 2 * 16 * 2
    assert (start.quantize, start.memory) == ("none", 0)
    assert start.settings == PIPELINE


async def test_a_gpu_is_bounded_by_its_budget(bench: Bench) -> None:
    start = await bench.assign(1 << 30, "cuda")
    assert isinstance(start, Start)
    assert start.memory == 1 << 30


async def test_too_small_a_budget_is_refused_with_the_numbers(bench: Bench) -> None:
    reason = await bench.assign(600_000)
    assert isinstance(reason, str), reason
    for part in ("layers 0:3 of m need at least ", "weights +", "activations +", "margin +"):
        assert part in reason
    assert "the budget is 600.0 kB: " in reason


async def test_quantize_reaches_the_worker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    start = await bench.assign(1 << 30, quantize="nf4")
    assert isinstance(start, Start)
    assert start.quantize == "nf4"


async def test_without_bitsandbytes_it_says_what_to_install(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    reason = await bench.assign(8 << 30, "cuda", quantize="int8")
    assert isinstance(reason, str)
    assert "int8 weights need bitsandbytes" in reason
    assert "pip install bitsandbytes" in reason
