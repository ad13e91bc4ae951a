"""Rounds in which two sides take turns, so that a noisy machine is equally unfair to both."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Measure = Callable[[int], float]


def take_turns(ours: Measure, baseline: Measure, rounds: int) -> tuple[list[float], list[float]]:
    """Both figures of each round; who goes first alternates."""
    left: list[float] = []
    right: list[float] = []
    for index in range(rounds):
        for measure, found in ((ours, left), (baseline, right))[:: -1 if index % 2 else 1]:
            found.append(measure(index))
    return left, right


def compare(ours: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Medians of both, and the median of the rounds' ratios."""
    ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
    return {
        "molink": statistics.median(ours),
        "baseline": statistics.median(baseline),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
