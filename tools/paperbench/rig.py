"""Real processes and TCP on the emulated network, beside the simulator."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from molink.bench.report import Sample, Summary
from molink.bench.workload import read_trace
from molink.errors import UsageError, WorkerError
from molink.sim.simulate import SimPipeline
from molink.sim.workload import Workload
from tools.emulation.activations import BUNDLED, make_recording, source_of
from tools.emulation.drive import Driven, Spec
from tools.emulation.model import Emulation
from tools.emulation.ring import Host, RingSettings
from tools.paperbench.published import DEVICE, MODEL, STAGES, Setting
from tools.paperbench.variants import ALL, CONCURRENT, FIFO, RIVALS, Variant
from tools.paperbench.workload import make_scenario, make_workload
from tools.wan import Node, Rig, unavailable
from tools.wan.namespaces import NONE, enter_command

RATES = (0.2, 0.7)
CONGESTION = ("cubic", "bbr")
SYSTEMS = (FIFO, CONCURRENT, *RIVALS, ALL)
#: Overhead of a run in seconds: namespaces, processes, handshakes.
OVERHEAD_S = 12.0
_PRIORITY = -10
#: A queue that never overflows, in bytes.
_ENDLESS = 8 << 20
#: Milliseconds to hand a message on: 16 KB on an idle hop of 100 Mbps and 15 ms take 17.5 ms
#: (``docs/results/link.json``), of which 15 + 1.4 are the link's.
HANDLING_MS = 1.1


@dataclass(frozen=True, slots=True)
class RigPlan:
    """What to run; times in seconds."""

    trace: Path
    activations: Path
    warmup: float = 20.0
    duration: float = 75.0
    rates: Sequence[float] = RATES
    congestion: Sequence[str] = CONGESTION
    systems: Sequence[Variant] = SYSTEMS
    seed: int = 0
    #: Runs per row with seeds from ``seed`` on, counted together.
    repeats: int = 1

    @property
    def rows(self) -> list[tuple[Setting, str, Variant]]:
        """Every row: setting, congestion control, system."""
        return [
            (Setting(rate=rate), congestion, system)
            for rate in self.rates
            for congestion in self.congestion
            for system in self.systems
        ]

    @property
    def seconds(self) -> float:
        """Estimated duration."""
        return len(self.rows) * self.repeats * (self.warmup + self.duration + OVERHEAD_S)

    @property
    def seeds(self) -> range:
        """Seeds of a row."""
        return range(self.seed, self.seed + self.repeats)


def run_rig(plan: RigPlan) -> Iterator[dict[str, Any]]:
    """Run the plan; yield each row's results as plain values.

    Missing activations are recorded from the bundled model.

    Raises:
        UsageError: the rig is unavailable.
    """
    if (reason := unavailable()) is not None:
        raise UsageError(f"no WAN rig here: {reason}")
    if not plan.activations.is_file():
        make_recording(BUNDLED, plan.activations)
    # Other programs must not delay emulated devices or the relay; children inherit this.
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    for setting, congestion, system in plan.rows:
        yield _run_row(plan, setting, congestion, system)


def _run_row(plan: RigPlan, setting: Setting, congestion: str, system: Variant) -> dict[str, Any]:
    """Run all seeds of a row and merge their requests."""
    runs = [_run(plan, setting, congestion, system, seed) for seed in plan.seeds]
    measured = Figures.of([sample for run in runs for sample in run.driven.samples], plan.warmup)
    expected = Figures.of([sample for run in runs for sample in run.expected], plan.warmup)
    return {
        "system": system.name,
        "rate": setting.rate,
        "bandwidth_mbps": setting.mbps,
        "latency_ms": setting.latency_ms,
        "congestion": congestion,
        "switches": {
            name: getattr(system, name)
            for name in ("policy", "cut_through", "compression", "micro_batches", "prefill_only")
        },
        "rig": measured.as_json(),
        "simulated": expected.as_json(),
        "rig_by_simulated": measured.by(expected),
        "late_share": [
            max(each) for each in zip(*(r.driven.late_share for r in runs), strict=True)
        ],
        "runs": [run.as_json(plan.warmup) for run in runs],
    }


@dataclass(frozen=True, slots=True)
class _Run:
    """Results of one seed."""

    seed: int
    driven: Driven
    expected: Sequence[Sample]
    relay: dict[str, Any]

    def as_json(self, warmup: float) -> dict[str, Any]:
        """Plain values."""
        measured = Figures.of(self.driven.samples, warmup)
        return {
            "seed": self.seed,
            "rig_by_simulated": measured.by(Figures.of(self.expected, warmup)),
            "late_share": self.driven.late_share,
            "worst_late_s": self.driven.worst_late_s,
            "counters": self.driven.counters,
            "gauges": self.driven.gauges,
            "trouble": self.driven.trouble,
            "relay": self.relay,
        }


def _run(plan: RigPlan, setting: Setting, congestion: str, system: Variant, seed: int) -> _Run:
    workload = make_workload(read_trace(plan.trace), setting, plan.warmup, plan.duration, seed)
    until = plan.warmup + plan.duration
    expected = _simulate_row(workload, setting, system, until, congestion)
    node = Node("", setting.mbps, setting.mbps, setting.latency_ms)
    if congestion == NONE:
        node = replace(node, queue_bytes=_ENDLESS)
    nodes = [replace(node, name=f"stage{index}") for index in range(STAGES)]
    with Rig(nodes, congestion=congestion, seed=seed) as rig:
        hosts = [
            Host(rig.address(index), tuple(enter_command(rig.namespace(index))))
            for index in range(STAGES)
        ]
        spec = Spec(
            Emulation(activations=str(plan.activations.resolve()), device=DEVICE, model=MODEL),
            RingSettings(
                system.policy,
                system.cut_through,
                system.compression,
                system.micro_batches,
                system.max_num_batched_tokens,
                prefill_only=system.prefill_only,
            ),
            tuple(hosts),
            tuple(workload.plan_requests()),
            until,
            seed,
        )
        driven = _drive_spec(rig, spec)
        return _Run(seed, driven, expected, rig.stats())


def _drive_spec(rig: Rig, spec: Spec) -> Driven:
    """Run ``spec`` beside the scheduler."""
    with tempfile.TemporaryDirectory(prefix="molink-paper-") as folder:
        asked, answered = Path(folder) / "spec.json", Path(folder) / "result.json"
        asked.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "tools.emulation.drive", str(asked), str(answered)]
        process = rig.run(0, command, cwd=Path(__file__).parents[2])
        if process.wait(spec.until + 300) != 0:
            raise WorkerError("a run on the rig failed; see above")
        return msgspec.json.decode(answered.read_bytes(), type=Driven)


def _simulate_row(
    workload: Workload, setting: Setting, system: Variant, until: float, congestion: str
) -> Sequence[Sample]:
    """Simulate the same requests, cut off at the same time."""
    scenario = make_scenario(workload, setting, system, congestion, HANDLING_MS)
    pipeline = SimPipeline(scenario, workload.plan_requests())
    pipeline.run(until)
    if pipeline.failure:
        raise WorkerError(f"the simulation failed: {pipeline.failure}")
    samples = pipeline.clients.collect_samples(0.0)
    return [replace(sample, error=None if sample.piece_times else "none") for sample in samples]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures in seconds; cut-off requests count with their tokens so far."""

    requests: int
    answered: int
    tokens: int
    ttft: Summary
    tpot: Summary
    itl: Summary

    @classmethod
    def of(cls, samples: Sequence[Sample], since: float) -> "Figures":
        """Figures of requests sent from ``since`` on."""
        counted = [sample for sample in samples if sample.sent_at >= since]
        done = [sample for sample in counted if sample.piece_times]
        return cls(
            len(counted),
            len(done),
            sum(sample.output_tokens for sample in done),
            Summary.from_values(sample.ttft for sample in done),
            Summary.from_values(sample.tpot for sample in done if sample.tpot is not None),
            Summary.from_values(gap for sample in done for gap in sample.itl),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "requests": self.requests,
            "answered": self.answered,
            "tokens": self.tokens,
            "ttft_s": _summarize(self.ttft),
            "tpot_s": _summarize(self.tpot),
            "itl_s": _summarize(self.itl),
        }

    def by(self, other: "Figures") -> dict[str, float]:
        """Means relative to another's."""
        pairs = {"ttft": (self.ttft, other.ttft), "tpot": (self.tpot, other.tpot)}
        return {
            name: ours.mean / theirs.mean
            for name, (ours, theirs) in pairs.items()
            if ours.mean and theirs.mean
        }


def _summarize(summary: Summary) -> dict[str, float | None]:
    return {name: getattr(summary, name) for name in ("mean", "p50", "p90", "p99")}


def write_results(
    results: Sequence[dict[str, Any]], plan: RigPlan, command: str, path: Path
) -> None:
    """Write results and the command that makes them."""
    found = {
        "command": command,
        "warmup_s": plan.warmup,
        "duration_s": plan.duration,
        "emulated": "compute sleeps as long as the roofline of the device says",
        "activations": source_of(plan.activations),
        "repeats": plan.repeats,
        "rows": list(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
