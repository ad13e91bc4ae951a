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
    begin: float = 1.10
    keep: float = 1.03
    #: The most of one core that a stage between two full links may spend on it, which unpacks what
    #: comes and packs what goes; to begin, three quarters of it.
    share: float = 0.25
    #: Seconds between two times that messages are packed while it doesn't pay, and unpacked again
    #: for their time; so many one after another, as the first finds cold caches.
    sample_every: float = 1.0
    samples: int = 3
    #: What a link is taken for until it has been measured: 100 Mbps.
    assumed_rate: float = 12.5e6
    #: Measurements that count, of each kind: their lower quartile, as a process is interrupted at
    #: any time, and a message that comes after a pause is no measure of a stream of them.
    window: int = 12


class PackChoice(msgspec.Struct, frozen=True):
    """What to do with a message; a ``sample`` is unpacked again, to know how long that takes."""

    coding: Coding
    sample: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """``plain`` bytes became ``coded`` in ``seconds``; ``unpack`` seconds back, if known."""

    plain: int
    coded: int
    seconds: float
    unpack: float | None = None


@dataclass(frozen=True, slots=True)
class Worth:
    """What packing gives: ``gain`` is plain time over packed time, ``share`` the part of a core."""

    gain: float
    share: float


class _Kind:
    """Measurements of one kind of messages."""

    def __init__(self, window: int) -> None:
        self.pack: deque[float] = deque(maxlen=window)
        self.unpack: deque[float] = deque(maxlen=window)
        self.sizes: deque[tuple[int, int]] = deque(maxlen=window)
        self.on = False
        self.sampled_at: float | None = None
        #: Samples still to be taken.
        self.samples = 0

    def add(self, packed: Packed) -> None:
        self.pack.append(packed.seconds / packed.plain)
        self.sizes.append((packed.plain, packed.coded))
        if packed.unpack is not None:
            self.unpack.append(packed.unpack / packed.plain)

    def worth(self, rate: float) -> Worth | None:
        if not self.pack or not self.unpack:
            return None
        work = _typical(self.pack) + _typical(self.unpack)
        ratio = sum(plain for plain, _ in self.sizes) / sum(coded for _, coded in self.sizes)
        return Worth(1 / (rate * work + 1 / ratio), ratio * rate * work)


def _typical(seconds: Collection[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


class Compressor:
    """Decides for one link; decided again with each measurement and each rate."""

    def __init__(self, setting: Compression, limits: CompressorLimits | None = None) -> None:
        self._coding = _CODINGS[setting]
        self._limits = limits or CompressorLimits()
        self._rate = self._limits.assumed_rate
        self._kinds = {bulk: _Kind(self._limits.window) for bulk in (False, True)}

    def measured(self, rate: float | None) -> None:
        """The link carries ``rate`` bytes/s; ``None`` or 0 if that is not known."""
        self._rate = rate or self._limits.assumed_rate
        for kind in self._kinds.values():
            self._decide(kind)

    def choose(self, bulk: bool, now: float) -> PackChoice:
        """What to do with a message of prefill rows (``bulk``) or decode rows."""
        kind = self._kinds[bulk]
        if self._coding is Coding.PLAIN:
            return PackChoice(Coding.PLAIN)
        due = kind.sampled_at is None or now >= kind.sampled_at + self._limits.sample_every
        if due:
            kind.sampled_at = now
            kind.samples = self._limits.samples
        sample = kind.samples > 0
        kind.samples = max(0, kind.samples - 1)
        return PackChoice(self._coding if sample or kind.on else Coding.PLAIN, sample=sample)

    def packed(self, bulk: bool, packed: Packed) -> None:
        """A message has been packed (to ``coded == plain`` bytes if that made it no smaller)."""
        kind = self._kinds[bulk]
        kind.add(packed)
        self._decide(kind)

    def worth(self, bulk: bool) -> Worth | None:
        """What packing messages of a kind gives now; ``None`` if none has been packed."""
        return self._kinds[bulk].worth(self._rate)

    def packs(self, bulk: bool) -> bool:
        """Whether messages of a kind are packed, apart from samples."""
        return self._kinds[bulk].on

    def _decide(self, kind: _Kind) -> None:
        worth = kind.worth(self._rate)
        if worth is None:
            return
        limits = self._limits
        if kind.on:
            kind.on = worth.gain >= limits.keep and worth.share <= limits.share
        else:
            kind.on = worth.gain >= limits.begin and worth.share <= 0.75 * limits.share
