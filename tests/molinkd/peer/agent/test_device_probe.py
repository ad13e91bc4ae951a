"""Measuring the device in a subprocess, and the memory budget of stages."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch

from molink.errors import WorkerError
from molink.facts.settings import PipelineSettings
from molinkd.peer.agent.device_probe import (
    DeviceProbe,
    measure_device,
    num_worker_threads,
    stage_memory_budget,
    torch_version,
)
from molinkd.peer.settings import MemoryShare, Settings
from molinkd.platform import num_cores
from tests.support.net import until

RESULT = {
    "kind": "cpu",
    "index": 0,
    "name": "a CPU",
    "total": 16_000,
    "free": 8_000,
    "read_rate": 1e9,
    "bf16": False,
    "threads": 1,
    "instructions": " (AVX2)",
    "torch": "2",
}
PROBE = DeviceProbe(**RESULT)


def command(tmp_path: Path, result: object = RESULT) -> tuple[str, ...]:
    """A stand-in for the probe that notes each run."""
    runs = tmp_path / "runs"
    code = f"open({str(runs)!r}, 'a').write('x'); print({json.dumps(result)!r})"
    return (sys.executable, "-c", code)


async def test_the_device_is_measured_once(tmp_path: Path) -> None:
    cache = tmp_path / "device.json"
    settings = Settings(name="n")
    first = await measure_device(settings, cache, command(tmp_path))
    again = await measure_device(settings, cache, command(tmp_path))
    assert first == again
    assert (first.device.memory, first.device.read_rate, first.name) == (8_000, 1e9, "cpu")
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "x"
    await measure_device(Settings(name="n", threads=3), cache, command(tmp_path))
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "xx"


async def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    cache = tmp_path / "device.json"
    cache.write_text("nonsense", encoding="utf-8")
    await measure_device(Settings(name="n"), cache, command(tmp_path))
    assert (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise RuntimeError('no such device')", "no such device"),
        ("print('hello')", "invalid"),
        ("pass", "invalid"),
    ],
)
async def test_failures_quote_the_reason(tmp_path: Path, code: str, text: str) -> None:
    with pytest.raises(WorkerError, match=text):
        await measure_device(
            Settings(name="n"), tmp_path / "device.json", (sys.executable, "-c", code)
        )


async def test_a_cancelled_measurement_kills_its_process(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    code = f"open({str(mark)!r}, 'w').close(); import time; time.sleep(3600)"
    task = asyncio.create_task(
        measure_device(Settings(name="n"), tmp_path / "d.json", (sys.executable, "-c", code))
    )
    await until(mark.exists)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


def test_memory_budgets() -> None:
    assert stage_memory_budget(Settings(name="n"), PROBE) == 8_000
    assert stage_memory_budget(Settings(name="n", stages_per_host=2), PROBE) == 4_000
    assert stage_memory_budget(Settings(name="n", memory=100), PROBE) == 100
    assert stage_memory_budget(Settings(name="n", memory=10**9), PROBE) == 16_000
    assert stage_memory_budget(Settings(name="n", memory=MemoryShare(25.0)), PROBE) == 4_000
    assert stage_memory_budget(Settings(name="n", memory=MemoryShare(100.0)), PROBE) == 16_000


def test_a_gpu_budget_leaves_room_for_contexts_and_other_stages() -> None:
    gib = 1 << 30
    gpu = DeviceProbe(**RESULT | {"kind": "cuda", "total": 10 * gib, "free": 10 * gib})
    assert stage_memory_budget(Settings(name="n"), gpu) == 8 * gib
    busy = DeviceProbe(**RESULT | {"kind": "cuda", "total": 10 * gib, "free": 3 * gib})
    assert stage_memory_budget(Settings(name="n"), busy) == 2 * gib
    full = DeviceProbe(**RESULT | {"kind": "cuda", "total": 10 * gib, "free": 0})
    assert stage_memory_budget(Settings(name="n"), full) == 0
    # The user's setting doesn't depend on other programs, but the CUDA context is subtracted.
    assert stage_memory_budget(Settings(name="n", memory=MemoryShare(80.0)), busy) == 8 * gib
    assert stage_memory_budget(Settings(name="n", memory=12 * gib), busy) == 9 * gib


async def test_free_memory_of_a_gpu_is_measured_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        gpu = command(tmp_path, RESULT | {"kind": "cuda"})
        await measure_device(Settings(name="n"), tmp_path / "device.json", gpu)
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "xx"


async def test_a_gpu_reports_what_its_kernels_have_proven(tmp_path: Path) -> None:
    for result in (RESULT, RESULT | {"blocks": True, "reads_pages": True, "block_size": 256}):
        gpu = command(tmp_path, result | {"kind": "cuda"})
        checks = tmp_path / "checks.json"
        found = await measure_device(Settings(name="n"), tmp_path / "d.json", gpu, checks)
        device, setup = found.device, found.stage_setup(PipelineSettings(), "auto")
        facts = (device.has_block_kernels, device.reads_pages, device.block_size)
        assert facts == ((True, True, 256) if "blocks" in result else (False, False, 1))
        assert (setup.has_block_kernels, setup.reads_pages) == facts[:2]
    assert found.required_kernels == ("gguf-blocks", "triton-attention")
    assert found.without_kernels(("gguf-blocks",)).required_kernels == ("triton-attention",)
    paged = found.without_kernels(("flash-attention", "triton-attention", "int8"))
    assert paged.required_kernels == ("gguf-blocks",)
    assert paged.device.block_size == 1
    assert found.without_kernels(()) == found


async def test_the_file_of_kernel_checks_is_passed(tmp_path: Path) -> None:
    code = f"import json, sys; print(json.dumps({RESULT!r} | {{'name': sys.argv[-1]}}))"
    probe, checks = (sys.executable, "-c", code), tmp_path / "checks"
    found = await measure_device(Settings(name="n"), tmp_path / "d.json", probe, checks)
    assert found.device.name == str(checks)


@pytest.mark.parametrize(("crashes", "is_measured"), [(2, True), (3, False)])
async def test_a_probe_that_crashes_is_repeated(
    tmp_path: Path, crashes: int, is_measured: bool
) -> None:
    """Its third run leaves out the kernel that crashes it."""
    runs = tmp_path / "runs"
    code = f"""
import os, pathlib
runs = pathlib.Path({str(runs)!r})
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
if len(runs.read_text()) <= {crashes}:
    os._exit(0xC0000005) if os.name == "nt" else os.abort()
print({json.dumps(RESULT)!r})
"""
    probe = (sys.executable, "-c", code)
    measuring = measure_device(Settings(name="n"), tmp_path / "d.json", probe)
    if is_measured:
        assert (await measuring).name == "cpu"
    else:
        with pytest.raises(WorkerError, match="can't measure the device"):
            await measuring
    assert runs.read_text(encoding="utf-8") == "xxx"


def test_cpu_threads_per_stage() -> None:
    assert num_worker_threads(Settings(name="n", threads=5)) == 5
    assert num_worker_threads(Settings(name="n", stages_per_host=64)) == max(1, num_cores() // 64)


def test_the_version_of_torch_is_read_without_its_metadata() -> None:
    assert torch_version() == torch.__version__
