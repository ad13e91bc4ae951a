"""What is to be reached, and whether it was.

Everything is compared with the best that the same simulator gives: a target that plain policies
meet too would say nothing of ours. What is saturated is no baseline.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.paperbench.published import TABLES, Figures, Setting
from tools.paperbench.results import Measured, Results
from tools.paperbench.variants import ALL, CONCURRENT, FIFO, MOLINK, RIVALS

#: At most so many times the best time per token of any policy with the same switches.
NEAR_BEST = 1.01
#: The time to a first token counts beside those whose time per token is within this of the best.
COMPARABLE = 1.05
#: The best plain system takes at least so many times as long to a first token, and per token.
TTFT_GAIN = 2.0
TPOT_GAIN = 1.0


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
    settings = dict.fromkeys(row.setting for table in TABLES.values() for row in table)
    return [verdict for setting in settings for verdict in _row(results, setting)]


def _row(results: Results, setting: Setting) -> Iterator[Verdict]:
    ours = results.of(setting, ALL.name)
    if ours is None:
        return
    where = setting.name
    rivals = [ours, *_sound(results, setting, [each.name for each in RIVALS])]
    if len(rivals) > 1:
        best = min(each.tpot for each in rivals)
        comparable = [each for each in rivals if each.tpot <= COMPARABLE * best]
        first = min(each.ttft for each in comparable)
        yield Verdict(where, "TPOT / best policy's", ours.tpot / best, NEAR_BEST)
        yield Verdict(where, "TTFT / best comparable policy's", ours.ttft / first, 1.0)
    plain = _sound(results, setting, [each.name for each in (CONCURRENT, FIFO, MOLINK)])
    if plain:
        tpot, ttft = min(each.tpot for each in plain), min(each.ttft for each in plain)
        yield Verdict(where, "best plain TPOT / all switches'", tpot / ours.tpot, TPOT_GAIN, True)
        yield Verdict(where, "best plain TTFT / all switches'", ttft / ours.ttft, TTFT_GAIN, True)


def _sound(results: Results, setting: Setting, names: Sequence[str]) -> list[Measured]:
    """Those that answered and were not saturated."""
    found = [results.of(setting, name) for name in names]
    return [each for each in found if each is not None and not each.saturated]


def gain(ours: Figures, theirs: Figures) -> Figures:
    """By which share ``ours`` is less than ``theirs``."""
    return Figures(
        1 - ours.ttft / theirs.ttft,
        1 - ours.tpot / theirs.tpot,
        1 - ours.latency / theirs.latency,
    )
