"""Decides whether rows are packed before they are sent on a link (no I/O, no clock).

Packing pays off if packing, sending and unpacking a byte takes less time than sending it plain:
``s_pack + 1 / (ratio * rate) + s_unpack < 1 / rate``. Seconds per byte and the ratio are measured
on messages; the rate comes from the link's estimator. The next stage is assumed to be as fast as
this one. Decode and prefill rows are decided separately, since short messages cost more per byte.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from molink.facts.dtypes import Compression
from molink.wire.messages.base import Coding

_CODINGS: dict[Compression, Coding] = {
    "none": Coding.PLAIN,
    "lossless": Coding.LOSSLESS,
    "int8": Coding.INT8,
}


@dataclass(frozen=True, slots=True)
class CompressorLimits:
    """Limits at which packing pays off. Rates in bytes/s, times in seconds."""

    #: Minimum speedup of a packed byte to start packing, and to continue. The hysteresis absorbs
    #: noise.
    start_gain: float = 1.10
    keep_gain: float = 1.03
    #: Maximum share of one core for a stage between two full links, which unpacks and packs;
    #: packing starts below three quarters of it.
    max_core_share: float = 0.25
    #: Seconds between samples while packing doesn't pay off. Samples are unpacked again for timing,
    #: several in a row, since the first meets cold caches.
    sample_every: float = 1.0
    samples_in_row: int = 3
    #: Rate before the first measurement: 100 Mbps.
    assumed_rate: float = 12.5e6
    #: Number of recent samples per kind that count. Their lower quartile ignores interruptions and
    #: messages after a pause.
    max_samples: int = 12


class PackDecision(msgspec.Struct, frozen=True):
    """What to do with a message. A sample is unpacked again for timing."""

    coding: Coding
    is_sample: bool = False


@dataclass(frozen=True, slots=True)
class PackedSample:
    """Measurement of a packed message in bytes and seconds; ``unpack_s`` if known."""

    plain_bytes: int
    packed_bytes: int
    pack_s: float
    unpack_s: float | None = None


@dataclass(frozen=True, slots=True)
class PackingGain:
    """``gain`` is plain time divided by packed time, ``core_share`` the used share of a core."""

    gain: float
    core_share: float


class _KindSamples:
    """Measurements of one kind of message."""

    def __init__(self, window: int) -> None:
        self.pack: deque[float] = deque(maxlen=window)
        self.unpack: deque[float] = deque(maxlen=window)
        self.sizes: deque[tuple[int, int]] = deque(maxlen=window)
        self.is_packing = False
        self.sampled_at: float | None = None
        #: Samples still to take.
        self.samples = 0

    def add_sample(self, packed: PackedSample) -> None:
        self.pack.append(packed.pack_s / packed.plain_bytes)
        self.sizes.append((packed.plain_bytes, packed.packed_bytes))
        if packed.unpack_s is not None:
            self.unpack.append(packed.unpack_s / packed.plain_bytes)

    def estimate_gain(self, rate: float) -> PackingGain | None:
        if not self.pack or not self.unpack:
            return None
        work = _lower_quartile(self.pack) + _lower_quartile(self.unpack)
        ratio = sum(plain for plain, _ in self.sizes) / sum(coded for _, coded in self.sizes)
        return PackingGain(1 / (rate * work + 1 / ratio), ratio * rate * work)


def _lower_quartile(seconds: Collection[float]) -> float:
    return sorted(seconds)[(len(seconds) - 1) // 4]


class Compressor:
    """Decides for one link; each measurement and rate may change the decision."""

    def __init__(self, setting: Compression, limits: CompressorLimits | None = None) -> None:
        self._coding = _CODINGS[setting]
        self._limits = limits or CompressorLimits()
        self._rate = self._limits.assumed_rate
        self._kinds = {bulk: _KindSamples(self._limits.max_samples) for bulk in (False, True)}

    def set_rate(self, rate: float | None) -> None:
        """Set the link's rate in bytes/s (``None`` or 0: unknown)."""
        self._rate = rate or self._limits.assumed_rate
        for kind in self._kinds.values():
            self._decide(kind)

    def choose_coding(self, bulk: bool, now: float) -> PackDecision:
        """Decide what to do with a message of prefill rows (``bulk``) or decode rows."""
        kind = self._kinds[bulk]
        if self._coding is Coding.PLAIN:
            return PackDecision(Coding.PLAIN)
        due = kind.sampled_at is None or now >= kind.sampled_at + self._limits.sample_every
        if due:
            kind.sampled_at = now
            kind.samples = self._limits.samples_in_row
        sample = kind.samples > 0
        kind.samples = max(0, kind.samples - 1)
        return PackDecision(
            self._coding if sample or kind.is_packing else Coding.PLAIN, is_sample=sample
        )

    def on_packed(self, bulk: bool, packed: PackedSample) -> None:
        """Record a packed message, even if it did not shrink."""
        kind = self._kinds[bulk]
        kind.add_sample(packed)
        self._decide(kind)

    def estimate_gain(self, bulk: bool) -> PackingGain | None:
        """Estimate the gain of packing a kind of messages; ``None`` before any was packed."""
        return self._kinds[bulk].estimate_gain(self._rate)

    def is_packing(self, bulk: bool) -> bool:
        """Whether messages of a kind are packed, apart from samples."""
        return self._kinds[bulk].is_packing

    def _decide(self, kind: _KindSamples) -> None:
        worth = kind.estimate_gain(self._rate)
        if worth is None:
            return
        limits = self._limits
        if kind.is_packing:
            kind.is_packing = (
                worth.gain >= limits.keep_gain and worth.core_share <= limits.max_core_share
            )
        else:
            kind.is_packing = (
                worth.gain >= limits.start_gain and worth.core_share <= 0.75 * limits.max_core_share
            )
