"""The paper's tables in the simulator: every setting with every system."""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from molink.bench.workload import TraceRow
from molink.errors import UsageError
from molink.sim.simulate import simulate_scenario
from tools.paperbench.published import TABLE_2, Setting, list_settings
from tools.paperbench.variants import ABLATION, ALWAYS, VARIANTS, Variant
from tools.paperbench.workload import make_scenario, make_workload

#: Virtual seconds of warm-up and counted arrivals: shortened, and the paper's.
SHORT = (15.0, 45.0)
#: Shortened runs from :data:`BUSY_RATE` requests/s on, whose queues fill slowly.
SHORT_BUSY = (45.0, 60.0)
BUSY_RATE = 0.5
FULL = (60.0, 1800.0)


@dataclass(frozen=True, slots=True)
class SimPlan:
    """What to simulate, ``seeds`` times from ``seed`` on; times in virtual seconds, ``None`` for
    shortened runs.
    """

    trace: Sequence[TraceRow]
    warmup: float | None = None
    duration: float | None = None
    seed: int = 0
    seeds: int = 1

    def times(self, setting: Setting) -> tuple[float, float]:
        """Warm-up and duration at a setting."""
        warmup, duration = SHORT_BUSY if setting.rate >= BUSY_RATE else SHORT
        return (
            warmup if self.warmup is None else self.warmup,
            duration if self.duration is None else self.duration,
        )

    @property
    def tasks(self) -> list[tuple[Setting, Variant]]:
        """All pairs, longest first; every variant only for rows of Table 2."""
        rates = {row.setting for row in TABLE_2}
        pairs = [
            (setting, variant)
            for setting in list_settings()
            for variant in (VARIANTS if setting in rates else ALWAYS)
        ]
        shared = [(Setting(), variant) for variant in ABLATION.values()]
        every = list(dict.fromkeys([*pairs, *shared]))
        return sorted(every, key=lambda pair: -pair[0].rate)


@dataclass(frozen=True, slots=True)
class _Task:
    setting: Setting
    variant: Variant
    trace: tuple[TraceRow, ...]
    warmup: float
    duration: float
    seed: int


def run_simulations(plan: SimPlan, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the plan on all CPUs; plain values by setting and system.

    Seeds are averaged, with each seed's own values beside. Systems that cannot be simulated are
    left out and reported to ``say``.

    Raises:
        UsageError: no system can be simulated at a setting.
    """
    began = time.monotonic()
    found: dict[Setting, dict[str, list[dict[str, Any]]]] = {each: {} for each in list_settings()}
    seeds = range(plan.seed, plan.seed + plan.seeds)
    tasks = [_make_task(plan, *pair, seed) for pair in plan.tasks for seed in seeds]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        running = {pool.submit(_run_task, task): task for task in tasks}
        for number, done in enumerate(as_completed(running), start=1):
            task = running[done]
            try:
                outcome = done.result()
                found[task.setting].setdefault(task.variant.name, []).append(outcome)
            except UsageError as error:
                say(f"left out: {task.variant.name} at {task.setting.name}: {error}")
            if number % 20 == 0 or number == len(tasks):
                say(f"{number} of {len(tasks)} simulations, {time.monotonic() - began:.0f} s")
    for setting, systems in found.items():
        if not systems:
            raise UsageError(f"nothing to simulate at {setting.name}: raise --seconds")
    return {
        "seed": plan.seed,
        "seeds": plan.seeds,
        "settings": [
            {
                **asdict(setting),
                **dict(zip(("warmup_s", "duration_s"), plan.times(setting), strict=True)),
                "systems": _in_order(systems),
            }
            for setting, systems in found.items()
        ],
    }


def _make_task(plan: SimPlan, setting: Setting, variant: Variant, seed: int) -> _Task:
    times = plan.times(setting)
    rows = make_workload(plan.trace, setting, *times, seed).trace_rows
    return _Task(setting, variant, rows, *times, seed)


def _run_task(task: _Task) -> dict[str, Any]:
    workload = make_workload(task.trace, task.setting, task.warmup, task.duration, task.seed)
    began = time.process_time()
    outcome = simulate_scenario(make_scenario(workload, task.setting, task.variant)).as_json()
    return outcome | {"cpu_s": time.process_time() - began}


def _in_order(systems: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    names = [variant.name for variant in [*VARIANTS, *ABLATION.values()]]
    return {name: merge_runs(systems[name]) for name in dict.fromkeys(names) if name in systems}


def merge_runs(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge seeds: sums of counts, means of figures, peak KV use."""
    runs = sorted(runs, key=lambda run: run["seed"])
    merged = dict(runs[0])
    for count in ("completed", "failed", "output_tokens", "preemptions"):
        merged[count] = sum(run[count] for run in runs)
    merged["kv_peak"] = max(run["kv_peak"] for run in runs)
    for figure in ("ttft_s", "tpot_s", "itl_s", "latency_s"):
        merged[figure] = {
            name: _average([run[figure][name] for run in runs]) for name in runs[0][figure]
        }
    del merged["seed"]
    kept = ("seed", "completed", "ttft_s", "tpot_s", "latency_s", "kv_peak", "preemptions")
    merged["runs"] = [{name: run[name] for name in kept} for run in runs]
    return merged


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
