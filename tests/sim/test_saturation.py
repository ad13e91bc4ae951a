"""Prompts that arrive faster than the stages compute them, on PCs with one core each."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from molink.bench.workload import TraceRow
from molink.sim.profiles import LinkProfile, ModelProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import simulate_scenario
from molink.sim.workload import Workload

#: A core with AVX512-BF16 as `molink bench stage` measures it: 26 GB/s and 0.21 TFLOPS.
CORE = """
source = "measured"
memory_gbs = 26
tflops = 0.21
memory_gb = 8
memory_efficiency = 1.0
compute_efficiency = 1.0
step_ms = 0.5
blocks = true
"""
#: The model of ``tools.make_bench_model``.
MODEL = ModelProfile("bench", "", 24, 1024, 2816, 16, 4, 64, 32_000)


@pytest.fixture
def core(tmp_path: Path) -> str:
    path = tmp_path / "core.toml"
    path.write_text(CORE, encoding="utf-8")
    return str(path)


def measure(scenario: Scenario) -> list[float]:
    """Means of time to first token, time per token and whole answer, in seconds."""
    report = simulate_scenario(replace(scenario, shape=MODEL)).report
    means = [report.ttft_s.mean, report.tpot_s.mean, report.latency_s.mean]
    return [mean for mean in means if mean is not None]


@pytest.mark.parametrize("mbps", [20, 100])
def test_defaults_keep_up_with_plain_policies(core: str, mbps: float) -> None:
    sizes = random.Random(1)
    rows = tuple(TraceRow(0.0, sizes.randint(300, 2200), 24) for _ in range(40))
    load = Workload(2.0, 8.0, trace_rows=rows, max_prompt=4096)
    link = LinkProfile(mbps, 15, congestion="cubic", handling_ms=1.5)
    found = measure(Scenario(load, device=core, link=link))
    fifo = Scenario.make_baseline(load, "fifo", 3, link, core)
    concurrent = replace(fifo, policy="concurrent", max_num_batched_tokens=0)
    for figure, *others in zip(found, measure(fifo), measure(concurrent), strict=True):
        assert figure <= 1.03 * min(others)


def test_decode_rows_between_layers_wait_less(core: str, tmp_path: Path) -> None:
    fused = tmp_path / "fused.toml"
    fused.write_text(CORE.replace("blocks = true", "blocks = false"), encoding="utf-8")
    rows = tuple(TraceRow(0.0, 1200, 24) for _ in range(12))
    load = Workload(2.0, 4.0, trace_rows=rows, max_prompt=4096)
    link = LinkProfile(100, 15, handling_ms=1.5)
    (_, interleaved_s, _), (_, fused_s, _) = (
        measure(Scenario(load, device=device, link=link)) for device in (core, str(fused))
    )
    assert interleaved_s < 0.9 * fused_s
