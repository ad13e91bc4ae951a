"""What is to be reached, and whether it was."""

from collections.abc import Iterator
from dataclasses import dataclass

from tools.paperbench.published import TABLES, Figures, Row, Setting
from tools.paperbench.results import Measured, Results
from tools.paperbench.variants import ALL, CONCURRENT, FIFO, UNCOMPRESSED

#: The busiest row, where systems are told apart.
BUSY = Setting(rate=0.7)
#: At most so many times the floor.
NEAR_FLOOR = 1.15
#: At most this share of what the paper's MoLink took.
SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """``value`` has to be at least (or at most) ``bound``."""

    where: str
    what: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def judge(results: Results) -> list[Verdict]:
    """Every target that the results say something of."""
    rows = {row.setting: row for table in TABLES.values() for row in table}
    verdicts = list(_against_baselines(results))
    for row in rows.values():
        ours = results.of(row.setting, ALL.name)
        if ours is not None:
            verdicts += _row(row, ours, results.floor(row.setting))
    return verdicts


def _against_baselines(results: Results) -> Iterator[Verdict]:
    ours, plain = results.of(BUSY, ALL.name), results.of(BUSY, UNCOMPRESSED.name)
    for baseline in (FIFO, CONCURRENT):
        theirs = results.of(BUSY, baseline.name)
        if theirs is None or ours is None:
            continue
        where = f"{BUSY.rate:g} req/s, {baseline.name} by all switches"
        yield Verdict(where, "mean TPOT", theirs.tpot / ours.tpot, 2.2, True)
        yield Verdict(where, "p99 TPOT", theirs.tpot_p99 / ours.tpot_p99, 4.0, True)
        yield Verdict(where, "mean TTFT", theirs.ttft / ours.ttft, 2.0, True)
        if plain is not None:
            ratio = theirs.ttft / plain.ttft
            yield Verdict(where, "mean TTFT, compression off", ratio, 1.5, True)


def _row(row: Row, ours: Measured, floor: float) -> Iterator[Verdict]:
    where, paper = row.setting.name, row.molink
    yield Verdict(where, "TPOT by floor", ours.tpot / floor, NEAR_FLOOR)
    yield Verdict(where, "TTFT by the paper's", ours.ttft / paper.ttft, SHARE)
    if floor > paper.tpot * SHARE:
        # No system could take a third of the paper's time per token here.
        minimum = floor * ours.tokens_per_request
        yield Verdict(where, "latency by floor", ours.latency / minimum, NEAR_FLOOR)
    else:
        yield Verdict(where, "TPOT by the paper's", ours.tpot / paper.tpot, SHARE)
        yield Verdict(where, "latency by the paper's", ours.latency / paper.latency, SHARE)


def gain(ours: Figures, theirs: Figures) -> Figures:
    """By which share ``ours`` is less than ``theirs``."""
    return Figures(
        1 - ours.ttft / theirs.ttft,
        1 - ours.tpot / theirs.tpot,
        1 - ours.latency / theirs.latency,
    )
