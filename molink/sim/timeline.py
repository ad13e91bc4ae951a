"""Who computed and who sent when, during a window of a simulation."""

from dataclasses import dataclass, field
from typing import Literal

#: What a bar shows: a step with decode rows, with prefill rows or with both; a message of decode
#: rows or control, or of prefill rows.
BarKind = Literal["decode", "prefill", "fused", "decode sent", "prefill sent"]


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that took from ``begin`` to ``end`` (seconds), at a stage or on its link."""

    begin: float
    end: float
    kind: BarKind


@dataclass(slots=True)
class Timeline:
    """Keeps what happens between ``begin`` and ``end`` (seconds of the simulation)."""

    begin: float
    end: float
    stages: dict[int, list[Bar]] = field(default_factory=dict)
    links: dict[int, list[Bar]] = field(default_factory=dict)

    def add_step(self, stage: int, at: float, seconds: float, decode: int, prefill: int) -> None:
        """A stage computes."""
        kind: BarKind = "fused" if decode and prefill else "decode" if decode else "prefill"
        self._add_bar(self.stages, stage, Bar(at, at + seconds, kind))

    def add_transfer(self, stage: int, prefill: bool, begin: float, end: float) -> None:
        """A message passes the bottleneck of the link behind a stage."""
        kind: BarKind = "prefill sent" if prefill else "decode sent"
        self._add_bar(self.links, stage, Bar(begin, end, kind))

    def _add_bar(self, rows: dict[int, list[Bar]], row: int, bar: Bar) -> None:
        if bar.end > self.begin and bar.begin < self.end:
            rows.setdefault(row, []).append(bar)
