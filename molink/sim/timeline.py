"""Timeline of steps and transfers, and its SVG picture."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from molink.facts.layer_range import stage_number

#: Kinds of bars: a step with decode rows, prefill rows or both; a message with decode rows or
#: control data, or with prefill rows.
BarKind = Literal["decode", "prefill", "fused", "decode sent", "prefill sent"]


@dataclass(frozen=True, slots=True)
class Bar:
    """A step or a transfer, from ``begin`` to ``end`` (seconds)."""

    begin: float
    end: float
    kind: BarKind


@dataclass(slots=True)
class Timeline:
    """Records steps and transfers between ``begin`` and ``end`` (seconds)."""

    begin: float
    end: float
    stages: dict[int, list[Bar]] = field(default_factory=dict)
    links: dict[int, list[Bar]] = field(default_factory=dict)

    def add_step(self, stage: int, at: float, seconds: float, decode: int, prefill: int) -> None:
        kind: BarKind = "fused" if decode and prefill else "decode" if decode else "prefill"
        self._add_bar(self.stages, stage, Bar(at, at + seconds, kind))

    def add_transfer(self, stage: int, prefill: bool, begin: float, end: float) -> None:
        """Record a message at the bottleneck of the link after ``stage``."""
        kind: BarKind = "prefill sent" if prefill else "decode sent"
        self._add_bar(self.links, stage, Bar(begin, end, kind))

    def _add_bar(self, rows: dict[int, list[Bar]], row: int, bar: Bar) -> None:
        if bar.end > self.begin and bar.begin < self.end:
            rows.setdefault(row, []).append(bar)


_COLOURS: dict[BarKind, str] = {
    "decode": "#1f77b4",
    "prefill": "#ff9d3b",
    "fused": "#8b5fbf",
    "decode sent": "#1f77b4",
    "prefill sent": "#ffbe7d",
}
_LEGEND: tuple[tuple[str, str], ...] = (
    ("decode", _COLOURS["decode"]),
    ("prefill", _COLOURS["prefill"]),
    ("both in one step", _COLOURS["fused"]),
    ("idle", "#f0f0f0"),
)
_LEFT, _WIDTH, _ROW, _GAP, _TOP = 90, 1100, 18, 6, 44
_TITLE = 26
#: Bars that are fewer pixels apart are drawn as one.
_MERGE_GAP = 0.2


def draw_timelines(panels: Sequence[tuple[str, Timeline]], stages: int) -> str:
    """Draw an SVG: a panel per titled timeline, with a row for each stage and link."""
    rows = 2 * stages
    panel_height = _TITLE + rows * (_ROW + _GAP) + 24
    height = _TOP + panel_height * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(),
    ]
    for index, (title, timeline) in enumerate(panels):
        parts += _panel(title, timeline, stages, _TOP + index * panel_height)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _legend() -> list[str]:
    parts, left = [], _LEFT
    for label, colour in _LEGEND:
        parts.append(f'<rect x="{left}" y="12" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{left + 20}" y="24">{escape(label)}</text>')
        left += 40 + 8 * len(label)
    return parts


def _panel(title: str, timeline: Timeline, stages: int, top: int) -> list[str]:
    parts = [f'<text x="{_LEFT}" y="{top + 16}" font-weight="bold">{escape(title)}</text>']
    top += _TITLE
    for stage in range(stages):
        for name, bars in (
            (f"stage {stage_number(stage)}", timeline.stages.get(stage, [])),
            (f"link {stage_number(stage)}", timeline.links.get(stage, [])),
        ):
            parts.append(f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{name}</text>')
            parts.append(
                f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW}" fill="#f0f0f0"/>'
            )
            parts += _bars(bars, timeline, top)
            top += _ROW + _GAP
    return parts + _axis(timeline, top)


def _bars(bars: Sequence[Bar], timeline: Timeline, top: int) -> list[str]:
    scale = _WIDTH / (timeline.end - timeline.begin)
    joined: list[tuple[float, float, BarKind]] = []
    for bar in bars:
        begin = (max(bar.begin, timeline.begin) - timeline.begin) * scale
        end = (min(bar.end, timeline.end) - timeline.begin) * scale
        if joined and joined[-1][2] == bar.kind and begin - joined[-1][1] < _MERGE_GAP:
            joined[-1] = (joined[-1][0], end, bar.kind)
        else:
            joined.append((begin, end, bar.kind))
    return [
        f'<rect x="{_LEFT + begin:.2f}" y="{top}" width="{max(0.3, end - begin):.2f}" '
        f'height="{_ROW}" fill="{_COLOURS[kind]}"/>'
        for begin, end, kind in joined
    ]


def _axis(timeline: Timeline, top: int) -> list[str]:
    parts = []
    for mark in range(11):
        x = _LEFT + _WIDTH * mark / 10
        at = timeline.begin + (timeline.end - timeline.begin) * mark / 10
        parts.append(f'<text x="{x:.1f}" y="{top + 12}" text-anchor="middle">{at:.2f} s</text>')
    return parts
