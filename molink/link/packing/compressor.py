"""Decides whether rows are packed before they are sent on a link (no I/O, no clock).

Packing pays if the time to pack, send and unpack a byte is less than to send it plain:
``s_pack + 1 / (ratio * rate) + s_unpack < 1 / rate``. All of it is measured: the seconds per byte
and the ratio on the messages themselves, the rate by the link's estimator. The next stage is taken
to be as fast as this one. A message of few rows costs more per byte than a long one, so decode rows
and prefill rows in bulk are judged apart.
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
    """When packing pays. Rates in bytes/s, times in seconds."""

    #: How many times faster a packed byte has to be there than a plain one: to begin, and to go on.
    #: Between the two nothing changes, so that noise doesn't switch it.
    start_gain: float = 1.10
    keep_gain: float = 1.03
    #: The most of one core that a stage between two full links may spend on it, which unpacks what
    #: comes and packs what goes; to begin, three quarters of it.
    max_core_share: float = 0.25
    #: Seconds between two times that messages are packed while it doesn't pay, and unpacked again
    #: for their time; so many one after another, as the first finds cold caches.
    sample_every: float = 1.0
    samples_in_row: int = 3
    #: What a link is taken for until it has been measured: 100 Mbps.
    assumed_rate: float = 12.5e6
    #: Measurements that count, of each kind: their lower quartile, as a process is interrupted at
    #: any time, and a message that comes after a pause is no measure of a stream of them.
    max_samples: int = 12


class PackDecision(msgspec.Struct, frozen=True):
    """What to do with a message; a ``is_sample`` is unpacked again, to know how long that takes."""

    coding: Coding
    is_sample: bool = False


@dataclass(frozen=True, slots=True)
class PackedSample:
    """``plain_bytes`` bytes became ``packed_bytes`` in ``pack_s``; ``unpack_s`` seconds back, if
    known."""

    plain_bytes: int
    packed_bytes: int
    pack_s: float
    unpack_s: float | None = None


@dataclass(frozen=True, slots=True)
class PackingGain:
    """What packing gives: ``gain`` is plain time over packed time, ``core_share`` the part of a
    core."""

    gain: float
    core_share: float


class _KindSamples:
    """Measurements of one kind of messages."""

    def __init__(self, window: int) -> None:
        self.pack: deque[float] = deque(maxlen=window)
        self.unpack: deque[float] = deque(maxlen=window)
        self.sizes: deque[tuple[int, int]] = deque(maxlen=window)
        self.is_packing = False
        self.sampled_at: float | None = None
        #: Samples still to be taken.
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
    """The lower quartile."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


class Compressor:
    """Decides for one link; decided again with each measurement and each rate."""

    def __init__(self, setting: Compression, limits: CompressorLimits | None = None) -> None:
        self._coding = _CODINGS[setting]
        self._limits = limits or CompressorLimits()
        self._rate = self._limits.assumed_rate
        self._kinds = {bulk: _KindSamples(self._limits.max_samples) for bulk in (False, True)}

    def set_rate(self, rate: float | None) -> None:
        """The link carries ``rate`` bytes/s; ``None`` or 0 if that is not known."""
        self._rate = rate or self._limits.assumed_rate
        for kind in self._kinds.values():
            self._decide(kind)

    def choose_coding(self, bulk: bool, now: float) -> PackDecision:
        """What to do with a message of prefill rows (``bulk``) or decode rows."""
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
        """A message has been packed (to ``coded == plain`` bytes if that made it no smaller)."""
        kind = self._kinds[bulk]
        kind.add_sample(packed)
        self._decide(kind)

    def estimate_gain(self, bulk: bool) -> PackingGain | None:
        """What packing messages of a kind gives now; ``None`` if none has been packed."""
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
