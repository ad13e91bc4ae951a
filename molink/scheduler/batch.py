"""What a head hands to stage 0, and how a volume is put together."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from molink.scheduler.job import Job
from molink.wire.messages.base import Payload
from molink.wire.messages.data import (
    MAX_GROUPS,
    Admit,
    Grammar,
    History,
    Release,
    Rows,
    SwapIn,
    SwapOut,
    Table,
    Volume,
)

#: Bytes of a 4 KiB header that row groups may take; the rest is the frame around them.
_GROUP_BYTES_MAX = 4000
#: Most bytes of a group without block ids: array, request, start, count, after, array, sample,
#: no block to copy from, array. A block id takes ``_ID_BYTES`` at most, and so does a draft.
_GROUP_BYTES = 1 + 5 + 5 + 5 + 9 + 3 + 1 + 1 + 1
_ID_BYTES = 5


@dataclass(frozen=True, slots=True)
class HeadControl:
    """A control message; with its payload: ``ids`` or ``text``."""

    body: Admit | Grammar | History | Table | SwapIn | SwapOut | Release
    ids: Sequence[int] | None = None
    text: bytes | None = None

    @property
    def payload(self) -> bytes | None:
        """As a stage gets it."""
        return self.text if self.ids is None else array("i", self.ids).tobytes()


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
    source: int
    drafts: tuple[int, ...] = ()


class VolumeBuilder:
    """Collects row groups while their header stays within its bound."""

    def __init__(self, *, prefill: bool) -> None:
        self.prefill = prefill
        self._groups: list[_Group] = []
        self._bytes = 0
        #: Tokens that may be sampled, if each group is.
        self._samples = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, job: Job) -> bool:
        return any(group.job is job for group in self._groups)

    @property
    def jobs(self) -> list[Job]:
        """Those of its groups."""
        return [group.job for group in self._groups]

    @property
    def room(self) -> int:
        """Block ids that one more group may bring along; below 1 the volume is full.

        The id of a block to copy from always fits beside them.
        """
        if self._samples >= MAX_GROUPS:
            return 0
        return (_GROUP_BYTES_MAX - self._bytes - _GROUP_BYTES) // _ID_BYTES - 1

    @property
    def draft_room(self) -> int:
        """Drafts, with a block each, that its groups may still be given."""
        left = (_GROUP_BYTES_MAX - self._bytes) // (2 * _ID_BYTES)
        return max(0, min(MAX_GROUPS - self._samples, left))

    def add(self, job: Job, count: int, blocks: Sequence[int], released: int) -> None:
        """Issue the next ``count`` rows of ``job``, which bring ``blocks`` to its block table.

        ``released`` is the latest tick that released one of them.
        """
        end = job.issued + count
        sample = end == len(job.tokens)
        source = job.source if job.issued == job.reused else -1
        group = _Group(job, job.issued, count, tuple(blocks), sample, released, source)
        self._groups.append(group)
        self._bytes += _GROUP_BYTES + _ID_BYTES * (len(blocks) + (source >= 0))
        self._samples += 1
        job.issued = end
        job.announced += len(blocks)

    def add_drafts(
        self, job: Job, drafts: Sequence[int], blocks: Sequence[int], released: int
    ) -> None:
        """Let ``drafts`` follow the rows of ``job``, which bring ``blocks`` beside their own."""
        for index, group in enumerate(self._groups):
            if group.job is job:
                self._groups[index] = replace(
                    group,
                    blocks=(*group.blocks, *blocks),
                    released=max(group.released, released),
                    drafts=tuple(drafts),
                )
        self._bytes += _ID_BYTES * (len(drafts) + len(blocks))
        self._samples += len(drafts)
        job.announced += len(blocks)

    def add_ahead(
        self, job: Job, drafts: Sequence[int], blocks: Sequence[int], released: int
    ) -> None:
        """Let rows of nothing but ``drafts`` go on from those of ``job`` in flight."""
        start = len(job.tokens) + len(job.path)
        group = _Group(job, start, 0, tuple(blocks), True, released, -1, tuple(drafts))
        self._groups.append(group)
        self._bytes += _GROUP_BYTES + _ID_BYTES * (len(drafts) + len(blocks))
        self._samples += len(drafts)
        job.announced += len(blocks)

    def build(self, tick: int) -> HeadVolume:
        """The volume as ``tick``; its jobs have it in flight from now on."""
        rows, tokens = [], list[int]()
        for group in self._groups:
            job = group.job
            end = group.start + group.count
            after = max(job.last, group.released)
            rows.append(
                Rows(
                    job.id,
                    group.start,
                    group.count + len(group.drafts),
                    after,
                    group.blocks,
                    group.sample,
                    group.source,
                    group.drafts,
                )
            )
            tokens += job.tokens[group.start : end]
            tokens += group.drafts
            job.last = tick
            job.flight[tick] = group.start
            job.awaited.append(tick)
            job.path += group.drafts
        payload = Payload("i32", (len(tokens),))
        return HeadVolume(Volume(tick, self.prefill, tuple(rows), payload), tokens)
