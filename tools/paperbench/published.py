"""Figures of the MoLink paper (§5, Tables 2 to 5): 3 × RTX 4090, Qwen-7B, Azure conversation.

Tables 3 and 4 say 0.3 requests/s, but share Table 2's row of 0.2.
"""

from dataclasses import dataclass
from itertools import chain

STAGES = 3
DEVICE, MODEL = "rtx4090", "qwen-7b"
MAX_PROMPT, MAX_OUTPUT = 2048, 1024
#: The row shared by all tables.
RATE, MBPS, LATENCY_MS = 0.2, 100.0, 30.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Means in seconds."""

    ttft: float
    tpot: float
    latency: float


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of a table: its load and its links."""

    rate: float = RATE
    mbps: float = MBPS
    latency_ms: float = LATENCY_MS

    @property
    def name(self) -> str:
        """Display name and key."""
        return f"{self.rate:g} req/s, {self.mbps:g} Mbps, {self.latency_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Row:
    """The paper's three systems; vLLM is ``concurrent`` here, Helix ``fifo``."""

    setting: Setting
    concurrent: Figures
    fifo: Figures
    molink: Figures


def _make_row(
    setting: Setting,
    ttft: tuple[float, float, float],
    tpot: tuple[float, float, float],
    latency: tuple[float, float, float],
) -> Row:
    return Row(setting, *(Figures(*each) for each in zip(ttft, tpot, latency, strict=True)))


_SHARED = _make_row(Setting(), (3.74, 3.42, 3.30), (0.50, 0.47, 0.41), (111, 106, 93))

#: Request rates.
TABLE_2 = (
    _make_row(Setting(rate=0.7), (17.3, 14.2, 9.29), (3.49, 3.42, 3.01), (509, 497, 449)),
    _make_row(Setting(rate=0.3), (6.20, 5.66, 5.23), (1.69, 1.65, 1.30), (306, 299, 256)),
    _SHARED,
    _make_row(Setting(rate=0.1), (3.39, 3.27, 3.23), (0.28, 0.29, 0.26), (74, 75, 69)),
)
#: Bandwidths.
TABLE_3 = (
    _make_row(Setting(mbps=60), (8.07, 7.34, 7.32), (1.24, 1.21, 1.07), (229, 223, 213)),
    _SHARED,
    _make_row(Setting(mbps=200), (2.02, 1.86, 1.83), (0.29, 0.28, 0.25), (68, 64, 58)),
    _make_row(Setting(mbps=400), (1.45, 1.35, 1.26), (0.25, 0.23, 0.21), (56, 53, 47)),
)
#: Latencies.
TABLE_4 = (
    _make_row(Setting(latency_ms=10), (3.25, 3.13, 3.12), (0.31, 0.31, 0.27), (72, 72, 63)),
    _make_row(Setting(latency_ms=20), (3.46, 3.28, 3.19), (0.41, 0.40, 0.34), (94, 92, 79)),
    _SHARED,
    _make_row(Setting(latency_ms=50), (3.81, 3.73, 3.70), (0.67, 0.65, 0.59), (143, 139, 127)),
)
TABLES = {2: TABLE_2, 3: TABLE_3, 4: TABLE_4}
#: The ablation: both, chunked transmission only, micro-batch extension only, neither.
TABLE_5 = {
    "both": Figures(3.30, 0.41, 93.07),
    "chunked transmission only": Figures(3.37, 0.44, 99.25),
    "more micro-batches only": Figures(3.60, 0.43, 97.23),
    "neither": Figures(3.56, 0.48, 107.45),
}


def list_settings() -> list[Setting]:
    """Every setting once."""
    rows = chain(TABLE_2, TABLE_3, TABLE_4)
    return list(dict.fromkeys(row.setting for row in rows))
