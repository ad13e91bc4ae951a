"""Real worker processes over pipes."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

import molink
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.load import PeerLoad, StageLoad
from molink.wire.messages.worker_pipe import (
    FormRing,
    LoadStage,
    PeerKey,
    PeerKeys,
    RingFormed,
    WorkerLoaded,
)
from molinkd.api.backend import MetricValues, StageLabels, StageMetricValues
from molinkd.child_process import BoundedLog, ChildProcess, exit_text
from molinkd.peer.agent import worker_supervisor as supervisor_module
from molinkd.peer.agent.worker_supervisor import WorkerSupervisor, exit_reason
from tests.support.net import until

KEY = "k" * 40
FAKE = Path(__file__).with_name("fake_worker.py")
MEMBERS = PeerKeys(peers=(PeerKey(peer="a", public_key=KEY),))
START = LoadStage(
    pipeline="p1",
    stage=0,
    stages=1,
    layers=(0, 4),
    model_dir="x",
    dtype="auto",
    device="cpu",
    threads=1,
    public_key=KEY,
    secret_key=KEY,
    bind="127.0.0.1",
    ports=(0, 1),
    kv_bytes=1,
    block_size=16,
    max_model_len=128,
)


class Heard:
    """Records what a supervisor reports."""

    def __init__(self, folder: Path, how: str) -> None:
        self.messages: list[tuple[int, object]] = []
        self.exits: list[tuple[int, str]] = []
        self.news = asyncio.Event()
        command = (sys.executable, str(FAKE), how)
        self.supervisor = WorkerSupervisor(folder, self._said, self._exited, command)

    def _said(self, generation: int, message: object) -> None:
        self.messages.append((generation, message))
        self.news.set()

    def _exited(self, generation: int, reason: str) -> None:
        self.exits.append((generation, reason))
        self.news.set()

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not met():
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def heard(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Heard]:
    monkeypatch.setenv("PYTHONPATH", str(Path(molink.__file__).parents[1]))
    how = getattr(request, "param", "good")
    heard = Heard(tmp_path, how)
    yield heard
    await heard.supervisor.close()
    me = psutil.Process()
    assert not [child for child in me.children(recursive=True) if FAKE.name in _line(child)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


async def test_a_worker_loads_forms_and_stops(heard: Heard) -> None:
    pid = heard.supervisor.start_worker(1, START, MEMBERS)
    await heard.until(lambda: len(heard.messages) == 1)
    generation, loaded = heard.messages[0]
    assert generation == 1
    assert isinstance(loaded, WorkerLoaded)
    ring = (StageAddress(peer="a", public_key=KEY, addresses=(), port=1),)
    heard.supervisor.send_to_worker(1, FormRing(epoch=7, ring=ring, blocks=1, micro_batches=1))
    await heard.until(lambda: len(heard.messages) == 2)
    assert heard.messages[1] == (1, RingFormed(epoch=7))
    heard.supervisor.stop_worker(1)
    await heard.supervisor.close()
    assert not psutil.pid_exists(pid)
    assert heard.exits == []


async def test_metrics_never_fall(heard: Heard) -> None:
    heard.supervisor.start_worker(1, START, MEMBERS)
    await _until_steps(heard, 2.0)
    first = StageLabels("p1", "0:4", "0-0", "0-0")
    assert heard.supervisor.collect_metrics().stages == {
        first: StageMetricValues({"steps": 2.0}, {"members": 1.0})
    }
    assert heard.supervisor.read_gauges("members") == {"p1": 1.0}
    assert heard.supervisor.read_gauges("stage_decode_slowdown") == {}, "it has told none"
    heard.supervisor.start_worker(2, msgspec.structs.replace(START, layers=(4, 6)), MEMBERS)
    await _until_steps(heard, 4.0)
    figures = heard.supervisor.collect_metrics()
    assert figures.gauges == {"workers": 2.0, "standby_workers": 0.0}
    second = StageLabels("p1", "4:6", "0-0", "0-0")
    assert figures.stages[second] == StageMetricValues({"steps": 2.0}, {"members": 1.0})
    await heard.supervisor.close()
    assert heard.supervisor.collect_metrics() == MetricValues(
        {},
        {"workers": 0.0, "standby_workers": 0.0},
        {first: StageMetricValues({"steps": 2.0}), second: StageMetricValues({"steps": 2.0})},
    )


async def test_counters_of_a_returning_stage_continue(heard: Heard) -> None:
    heard.supervisor.start_worker(1, START, MEMBERS)
    await _until_steps(heard, 2.0)
    heard.supervisor.stop_worker(1)
    await until(lambda: not heard.supervisor.collect_metrics().gauges["workers"])
    heard.supervisor.start_worker(2, START, MEMBERS)
    await _until_steps(heard, 4.0)
    (figures,) = heard.supervisor.collect_metrics().stages.values()
    assert figures == StageMetricValues({"steps": 4.0}, {"members": 1.0})


async def test_only_the_latest_stages_counters_are_kept(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_RETIRED_STAGES", 2)
    for number in range(1, 4):
        heard.supervisor.start_worker(
            number, msgspec.structs.replace(START, layers=(number, number + 1)), MEMBERS
        )
    await _until_steps(heard, 6.0)
    await heard.supervisor.close()
    assert len(heard.supervisor.collect_metrics().stages) == 2


async def test_load_of_the_workers(heard: Heard) -> None:
    heard.supervisor.start_worker(1, START, MEMBERS)
    assert heard.supervisor.own_gpu_usage.share == 1.0, "it loads and measures, which is no game"
    await _until_steps(heard, 2.0)
    assert heard.supervisor.measure_load() == PeerLoad((StageLoad("p1", 0, busy=34),))
    assert heard.supervisor.own_gpu_usage.share == pytest.approx(0.34)


async def _start_with_standbys(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, *, free_bytes: int
) -> None:
    """Start worker 1, and let a standby worker start if ``free_bytes`` of memory allow it."""
    monkeypatch.setattr(supervisor_module, "STANDBY_DELAY_S", 0.0)
    memory = SimpleNamespace(available=free_bytes)
    monkeypatch.setattr(supervisor_module.psutil, "virtual_memory", lambda: memory)
    heard.supervisor.start_worker(1, START, MEMBERS)
    await heard.until(lambda: len(heard.messages) == 1)
    heard.supervisor.schedule_standby(1)


async def _start_standby(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> psutil.Process:
    """Start worker 1 and a standby worker."""
    await _start_with_standbys(heard, monkeypatch, free_bytes=1 << 30)
    await until(lambda: len(heard.supervisor.own_gpu_usage.pids) == 2)
    return psutil.Process(heard.supervisor.own_gpu_usage.pids[1])


def _count_ready_standbys(heard: Heard) -> float:
    return heard.supervisor.collect_metrics().gauges["standby_workers"]


async def test_the_standby_worker_becomes_the_next_worker(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = await _start_standby(heard, monkeypatch)
    await until(lambda: _count_ready_standbys(heard) == 1.0)
    heard.supervisor.schedule_standby(1)  # a second call starts no other
    other = msgspec.structs.replace(START, pipeline="p2", stage=3)
    assert heard.supervisor.start_worker(2, other, MEMBERS) == standby.pid
    await heard.until(lambda: len(heard.messages) == 2)
    generation, loaded = heard.messages[1]
    assert (generation, type(loaded)) == (2, WorkerLoaded)
    assert heard.supervisor.collect_metrics().gauges == {"workers": 2.0, "standby_workers": 0.0}
    standby.kill()
    await heard.until(lambda: bool(heard.exits))
    assert [generation for generation, _ in heard.exits] == [2]


@pytest.mark.parametrize("heard", ["loads"], indirect=True)
async def test_loading_progress_is_known_while_loading(heard: Heard) -> None:
    heard.supervisor.start_worker(1, START, MEMBERS)
    await until(lambda: heard.supervisor.loading_progress() == {1: (1, 4, 0)})
    heard.supervisor.stop_worker(1)
    await until(lambda: heard.supervisor.loading_progress() == {})
    assert heard.messages == []


async def test_two_losses_in_a_row_find_standby_workers_where_memory_is_free(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _start_with_standbys(heard, monkeypatch, free_bytes=64 << 30)
    await until(lambda: _count_ready_standbys(heard) == 2.0)
    _, *spares = heard.supervisor.own_gpu_usage.pids
    found = [heard.supervisor.start_worker(number, START, MEMBERS) for number in (2, 3)]
    assert found == spares


async def test_little_memory_holds_one_standby_worker(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _start_with_standbys(heard, monkeypatch, free_bytes=1 << 30)
    await until(lambda: _count_ready_standbys(heard) == 1.0)
    heard.supervisor.schedule_standby(1)
    await until(lambda: heard.supervisor._standby_timer is None)
    assert len(heard.supervisor.own_gpu_usage.pids) == 2


@pytest.mark.parametrize("heard", ["cold"], indirect=True)
async def test_an_unready_standby_worker_is_ahead_of_a_new_process(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = await _start_standby(heard, monkeypatch)
    assert heard.supervisor.start_worker(2, START, MEMBERS) == standby.pid
    await heard.until(lambda: len(heard.messages) == 2)


@pytest.mark.parametrize("heard", ["cold"], indirect=True)
async def test_the_first_standby_worker_is_used_unready(heard: Heard) -> None:
    heard.supervisor.start_standby()
    heard.supervisor.start_worker(1, START, MEMBERS)
    await heard.until(lambda: len(heard.messages) == 1)
    children = [each for each in psutil.Process().children() if FAKE.name in _line(each)]
    assert len(children) == 1


async def test_a_first_stage_can_wait_for_the_starting_standby_worker(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await heard.supervisor.wait_until_ready()  # returns at once: there is none
    heard.supervisor.start_standby()
    await heard.supervisor.wait_until_ready()
    assert _count_ready_standbys(heard) == 1.0


@pytest.mark.parametrize("heard", ["cold"], indirect=True)
async def test_waiting_for_a_standby_worker_times_out(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard.supervisor.start_standby()
    monkeypatch.setattr(supervisor_module, "STANDBY_WAIT_S", 0.0)
    await heard.supervisor.wait_until_ready()
    monkeypatch.setattr(supervisor_module, "STANDBY_WAIT_S", 1e6)
    (standby,) = heard.supervisor.own_gpu_usage.pids
    waiting = asyncio.create_task(heard.supervisor.wait_until_ready())
    psutil.Process(standby).kill()
    await waiting


async def test_the_standby_worker_can_be_dropped(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = await _start_standby(heard, monkeypatch)
    own = heard.supervisor.own_gpu_usage
    assert (len(own.pids), standby.pid in own.pids) == (2, True)
    heard.supervisor.drop_standbys()
    await until(lambda: not psutil.pid_exists(standby.pid))
    assert heard.supervisor.collect_metrics().gauges == {"workers": 1.0, "standby_workers": 0.0}
    assert heard.exits == []
    heard.supervisor.drop_standbys()
    heard.supervisor.start_standby()
    heard.supervisor.start_standby()
    assert len(heard.supervisor.own_gpu_usage.pids) == 2, "one standby, not two"


async def test_a_scheduled_standby_worker_can_be_cancelled(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "STANDBY_DELAY_S", 1e6)
    heard.supervisor.start_worker(1, START, MEMBERS)
    await heard.until(lambda: len(heard.messages) == 1)
    heard.supervisor.schedule_standby(1)
    heard.supervisor.drop_standbys()
    assert heard.supervisor._standby_timer is None


@pytest.mark.parametrize("heard", ["deaf"], indirect=True)
async def test_an_unresponsive_worker_is_killed(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_S", 1e6)
    pid = heard.supervisor.start_worker(1, START, MEMBERS)
    heard.supervisor.stop_worker(1, kill=True)
    await heard.supervisor.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("heard", ["mute"], indirect=True)
async def test_a_loading_worker_is_killed_at_once(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_S", 1e6)
    pid = heard.supervisor.start_worker(1, START, MEMBERS)
    heard.supervisor.stop_worker(1)
    await heard.supervisor.close()
    assert not psutil.pid_exists(pid)


async def test_the_exit_of_a_standby_worker_is_no_stage_failure(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = await _start_standby(heard, monkeypatch)
    await until(lambda: _count_ready_standbys(heard) == 1.0)
    standby.kill()
    await until(lambda: _count_ready_standbys(heard) == 0.0)
    assert heard.exits == []
    assert heard.supervisor.start_worker(2, START, MEMBERS) != standby.pid


async def _until_steps(heard: Heard, steps: float) -> None:
    def counted() -> float:
        stages = heard.supervisor.collect_metrics().stages.values()
        return sum(figures.counters.get("steps", 0.0) for figures in stages)

    await until(lambda: counted() == steps)


@pytest.mark.parametrize("heard", ["crash"], indirect=True)
async def test_a_crash_is_reported_with_its_last_line(heard: Heard, tmp_path: Path) -> None:
    heard.supervisor.start_worker(5, START, MEMBERS)
    await heard.until(lambda: bool(heard.exits))
    assert heard.exits == [(5, "the worker exited with code 3: RuntimeError: out of luck")]
    assert "out of luck" in (tmp_path / "worker-p1-0.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("heard", ["garbage"], indirect=True)
async def test_a_worker_with_invalid_output_is_killed(heard: Heard) -> None:
    heard.supervisor.start_worker(1, START, MEMBERS)
    await heard.until(lambda: bool(heard.exits))
    assert heard.messages == []


@pytest.mark.parametrize("heard", ["deaf"], indirect=True)
async def test_a_deaf_worker_is_killed(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_S", 0.2)
    pid = heard.supervisor.start_worker(1, START, MEMBERS)
    await heard.until(lambda: bool(heard.messages))
    await heard.supervisor.close()
    assert not psutil.pid_exists(pid)


async def test_a_process_that_cannot_start_is_reported(tmp_path: Path) -> None:
    supervisor = WorkerSupervisor(
        tmp_path, lambda *_: None, lambda *_: None, (str(tmp_path / "no-such-program"),)
    )
    with pytest.raises(FileNotFoundError):
        supervisor.start_worker(1, START, MEMBERS)
    await supervisor.close()


def test_exit_reasons() -> None:
    assert exit_reason(-9, "") == "the worker was terminated by signal 9"
    assert exit_reason(0xC0000005, "") == "the worker exited with code 0xC0000005"
    assert exit_reason(1, "a\nb\n\n") == "the worker exited with code 1: b"


@pytest.mark.parametrize("code", [-9, 1, 0, 0xC0000005])
def test_unrelated_log_lines_do_not_reach_clients(code: int) -> None:
    line = "2026-11-22 05:14:52,123 INFO molinkd.worker: connected to 192.168.1.7"
    assert exit_reason(code, line) == f"the worker {exit_text(code)}"


def test_a_fatal_error_is_quoted_without_its_log_prefix() -> None:
    line = "2026-11-22 05:14:52,123 ERROR molinkd.worker: WorkerError: out of memory"
    assert exit_reason(1, line) == "the worker exited with code 1: WorkerError: out of memory"


def test_logs_are_bounded(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "x.log", limit=100)
    for number in range(100):
        log.write_line(f"line {number:04d}\n".encode())
    log.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"x.log", "x.log.1"}
    assert max(sizes.values()) <= 100
    assert "line 0099" in (tmp_path / "x.log").read_text(encoding="utf-8")


def test_a_log_that_cannot_be_rotated_keeps_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*_: object) -> None:
        raise PermissionError("somebody reads it")

    monkeypatch.setattr(Path, "replace", replace)
    log = BoundedLog(tmp_path / "x.log", limit=20)
    for number in range(9):
        log.write_line(f"line {number}\n".encode())
    log.close()
    assert (tmp_path / "x.log").read_text(encoding="utf-8").count("line") == 9


async def test_a_child_gets_no_secrets_and_its_log_is_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOLINK_CPU_ISA", raising=False)
    for name in ("MOLINK_API_KEY", "MOLINK_TOKEN", "MOLINK_OTHER"):
        monkeypatch.setenv(name, "s3cret")
    code = (
        "import os, sys; print('evil\\x1b[2J', file=sys.stderr);"
        "print(*sorted(n for n in os.environ if n.startswith('MOLINK_')))"
    )
    said: list[object] = []
    ended = asyncio.Event()
    child = ChildProcess(
        "child",
        [sys.executable, "-c", code],
        reader=lambda stream: stream.readline().split() or None,
        on_message=said.append,
        on_exit=lambda _: ended.set(),
        log_file=tmp_path / "log",
    )
    child.start()
    await asyncio.wait_for(ended.wait(), 20)
    assert said == [[b"MOLINK_OTHER"]]
    # A worker's log can't control the terminal in which it is read, either.
    assert child.tail == r"evil\x1b[2J"
    assert (tmp_path / "log").read_bytes().splitlines() == [rb"evil\x1b[2J"]
