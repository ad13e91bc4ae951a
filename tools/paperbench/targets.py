"""Targets relative to the best of the same simulator; saturated runs are no baseline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.paperbench.published import TABLES, Figures, Setting
from tools.paperbench.results import Measured, Results
from tools.paperbench.variants import ALL, CONCURRENT, FIFO, MOLINK, RIVALS

#: Largest TPOT relative to the best policy with the same switches.
NEAR_BEST = 1.01
#: TTFT is compared among policies whose TPOT is within this factor of the best.
COMPARABLE = 1.05
#: Least TTFT and TPOT of the best plain system relative to ours.
TTFT_GAIN = 2.0
TPOT_GAIN = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """``value`` must be at least (or at most) ``bound``."""

    where: str
    what: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def judge_targets(results: Results) -> list[Verdict]:
    """Evaluate every target covered by the results."""
    settings = dict.fromkeys(row.setting for table in TABLES.values() for row in table)
    return [verdict for setting in settings for verdict in _judge_setting(results, setting)]


def _judge_setting(results: Results, setting: Setting) -> Iterator[Verdict]:
    ours = results.of(setting, ALL.name)
    if ours is None:
        return
    where = setting.name
    rivals = [ours, *_list_unsaturated(results, setting, [each.name for each in RIVALS])]
    if len(rivals) > 1:
        best = min(each.tpot for each in rivals)
        comparable = [each for each in rivals if each.tpot <= COMPARABLE * best]
        first = min(each.ttft for each in comparable)
        yield Verdict(where, "TPOT / best policy's", ours.tpot / best, NEAR_BEST)
        yield Verdict(where, "TTFT / best comparable policy's", ours.ttft / first, 1.0)
    plain = _list_unsaturated(results, setting, [each.name for each in (CONCURRENT, FIFO, MOLINK)])
    if plain:
        tpot, ttft = min(each.tpot for each in plain), min(each.ttft for each in plain)
        yield Verdict(where, "best plain TPOT / all switches'", tpot / ours.tpot, TPOT_GAIN, True)
        yield Verdict(where, "best plain TTFT / all switches'", ttft / ours.ttft, TTFT_GAIN, True)


def _list_unsaturated(results: Results, setting: Setting, names: Sequence[str]) -> list[Measured]:
    """Results that are present and not saturated."""
    found = [results.of(setting, name) for name in names]
    return [each for each in found if each is not None and not each.saturated]


def compute_gain(ours: Figures, theirs: Figures) -> Figures:
    """Relative reduction of ``ours`` against ``theirs``."""
    return Figures(
        1 - ours.ttft / theirs.ttft, 1 - ours.tpot / theirs.tpot, 1 - ours.latency / theirs.latency
    )
