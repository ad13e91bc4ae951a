"""Simulated results for tables and targets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.paperbench.published import Figures, Setting

#: KV use above this share counts as saturated.
FULL_KV = 0.98


@dataclass(frozen=True, slots=True)
class Measured:
    """One system at one setting, in seconds: means, and p99 of TPOT."""

    ttft: float
    tpot: float
    latency: float
    tpot_p99: float
    requests: int
    tokens_per_request: float
    micro_batches: int
    #: Half the range over the seeds.
    ttft_spread: float = 0.0
    tpot_spread: float = 0.0
    #: KV blocks ran out, so figures depend on the run's length.
    saturated: bool = False

    @property
    def figures(self) -> Figures:
        """Means only."""
        return Figures(self.ttft, self.tpot, self.latency)


class Results:
    """Results of :func:`tools.paperbench.simulated.run_simulations`."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.seed = found["seed"]
        self.seeds = found.get("seeds", 1)
        self._times = {
            Setting(each["rate"], each["mbps"], each["latency_ms"]): (
                each["warmup_s"],
                each["duration_s"],
            )
            for each in found["settings"]
        }
        self._systems: dict[Setting, dict[str, Any]] = {
            Setting(each["rate"], each["mbps"], each["latency_ms"]): each["systems"]
            for each in found["settings"]
        }

    @property
    def settings(self) -> Iterator[Setting]:
        """Every setting."""
        yield from self._systems

    def times(self, setting: Setting) -> tuple[float, float]:
        """Seconds of warm-up and of counted arrivals."""
        return self._times[setting]

    def names(self, setting: Setting) -> list[str]:
        """Simulated systems."""
        return list(self._systems[setting])

    def floor(self, setting: Setting) -> float:
        """Seconds of a round trip without waits, the least time per token."""
        # Two tensors per row take longer.
        return min(float(found["floor_s"]) for found in self._systems[setting].values())

    def of(self, setting: Setting, name: str) -> Measured | None:
        """Figures of ``name``; ``None`` if missing or without answers."""
        found = self._systems[setting].get(name)
        if found is None or found["tpot_s"]["mean"] is None:
            return None
        return Measured(
            found["ttft_s"]["mean"],
            found["tpot_s"]["mean"],
            found["latency_s"]["mean"],
            found["tpot_s"]["p99"],
            found["completed"],
            found["output_tokens"] / max(1, found["completed"]),
            found["micro_batches"],
            _compute_spread(found, "ttft_s"),
            _compute_spread(found, "tpot_s"),
            found.get("preemptions", 0) > 0 or found.get("kv_peak", 0.0) >= FULL_KV,
        )


def _compute_spread(found: dict[str, Any], figure: str) -> float:
    means = [run[figure]["mean"] for run in found.get("runs", ())]
    return (max(means) - min(means)) / 2 if means and None not in means else 0.0
