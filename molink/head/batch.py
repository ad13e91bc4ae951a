"""What a head hands to stage 0, and how a volume is put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.head.job import Job
from molink.wire.base import Payload
from molink.wire.data import MAX_GROUPS, Admit, History, Release, Rows, Volume

#: Bytes of a 4 KiB header that row groups may take; the rest is the frame around them.
_GROUP_BYTES_MOST = 3968
#: Most bytes of a group without block ids: array, request, start, count, after, array, sample.
_GROUP_BYTES = 1 + 5 + 5 + 5 + 9 + 3 + 1
_BLOCK_BYTES = 5


@dataclass(frozen=True, slots=True)
class HeadControl:
    """A control message; ``tokens`` are the ids of a :class:`History`'s payload."""

    body: Admit | History | Release
    tokens: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class HeadVolume:
    """A volume and the token ids of its rows, in order."""

    header: Volume
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch in the order of its ticks: controls, then at most one volume of each kind."""

    control: tuple[HeadControl, ...]
    volumes: tuple[HeadVolume, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    job: Job
    start: int
    count: int
    blocks: tuple[int, ...]
    sample: bool
    released: int


class VolumeBuilder:
    """Collects row groups while their header stays within its bound."""

    def __init__(self, *, prefill: bool) -> None:
        self.prefill = prefill
        self._groups: list[_Group] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, job: Job) -> bool:
        return any(group.job is job for group in self._groups)

    @property
    def room(self) -> int:
        """Block ids that one more group may bring along; below 1 the volume is full."""
        if len(self._groups) >= MAX_GROUPS:
            return 0
        return (_GROUP_BYTES_MOST - self._bytes - _GROUP_BYTES) // _BLOCK_BYTES

    def add(self, job: Job, count: int, blocks: Sequence[int], released: int) -> None:
        """Issue the next ``count`` rows of ``job``, which bring ``blocks`` to its block table.

        ``released`` is the latest tick that released one of them.
        """
        end = job.issued + count
        sample = end == len(job.tokens)
        group = _Group(job, job.issued, count, tuple(blocks), sample, released)
        self._groups.append(group)
        self._bytes += _GROUP_BYTES + _BLOCK_BYTES * len(blocks)
        job.issued = end
        job.announced += len(blocks)

    def build(self, tick: int) -> HeadVolume:
        """The volume as ``tick``; its jobs have it in flight from now on."""
        rows, tokens = [], list[int]()
        for group in self._groups:
            job = group.job
            end = group.start + group.count
            after = max(job.last, group.released)
            rows.append(Rows(job.id, group.start, group.count, after, group.blocks, group.sample))
            tokens += job.tokens[group.start : end]
            job.last = tick
            job.flight.add(tick)
        payload = Payload("i32", (len(tokens),))
        return HeadVolume(Volume(tick, self.prefill, tuple(rows), payload), tokens)
