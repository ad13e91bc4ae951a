"""Volumes at a stage, from the arrival of their first row until their last row has run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from molink.facts.images import ImageSpan, count_uncut
from molink.ring.step import StepInput
from molink.ring.sub_chunks import SubChunkPolicy
from molink.wire.messages.data_plane import RequestSlice, Volume

#: Returns a request's images that no step may split.
FindImages = Callable[[int], Sequence[ImageSpan]]


class SeqSet:
    """A set of sequence numbers from 1 on: a watermark up to which it has all, and the few above.

    Numbers are dense (each is used once), so the watermark advances and memory is bounded by how
    far messages overtake each other. ``seq`` 0 means "before anything" and is always in the set.
    """

    def __init__(self) -> None:
        #: All numbers up to and including this one are in the set.
        self.watermark = 0
        self._above: set[int] = set()

    def __contains__(self, seq: int) -> bool:
        return seq <= self.watermark or seq in self._above

    def __len__(self) -> int:
        """Numbers above the watermark."""
        return len(self._above)

    def add_seq(self, seq: int) -> None:
        """Add a number."""
        if seq <= self.watermark:
            return
        self._above.add(seq)
        while self.watermark + 1 in self._above:
            self.watermark += 1
            self._above.remove(self.watermark)

    def find_missing(self, seqs: Iterable[int]) -> set[int]:
        """Return those of ``seqs`` that are not in the set."""
        return {seq for seq in seqs if seq not in self}


@dataclass(slots=True)
class WaitingVolume:
    """A volume, with its arrived rows, remaining slices and taken rows.

    Arrived rows are counted from the volume's first row. Taken rows are counted within the
    remaining slices only; no slice is dropped after the first row was taken.
    """

    volume: Volume
    #: Bytes of rows, or a sequence (then ``nbytes`` is 0), for all rows; the first ``num_arrived``
    #: are valid.
    data: object
    nbytes: int
    num_arrived: int
    #: Indices of the remaining slices.
    slice_indices: list[int]
    slices: tuple[RequestSlice, ...]
    #: Rows of all slices, and of the remaining ones.
    num_rows: int
    num_remaining: int
    #: Whether everything that the remaining rows depend on is complete.
    is_ready: bool = False
    #: Number of remaining rows that were taken; those before the running sub-chunk have run.
    num_taken: int = 0
    #: Whether one of its sub-chunks is running.
    is_running: bool = False
    #: Arrival rate in rows/s after the first rows; 0 if unknown.
    row_rate: float = 0.0
    _first: tuple[int, float] = (0, 0.0)

    @classmethod
    def of_volume(
        cls, volume: Volume, data: object, arrived: int | None, now: float
    ) -> "WaitingVolume":
        """Create a volume whose first ``arrived`` rows (``None``: all) arrived at ``now``."""
        total = volume.count
        rows = total if arrived is None else arrived
        kept = list(range(len(volume.slices)))
        nbytes = len(data) if isinstance(data, bytes | bytearray | memoryview) else 0
        return cls(
            volume, data, nbytes, rows, kept, volume.slices, total, total, _first=(rows, now)
        )

    @property
    def is_started(self) -> bool:
        """Whether any row was taken."""
        return self.num_taken > 0

    @property
    def is_taken(self) -> bool:
        """Whether all rows were taken."""
        return self.num_taken >= self.num_remaining

    @property
    def num_available(self) -> int:
        """Number of remaining rows that have arrived and were not taken."""
        if self.num_arrived == self.num_rows:
            return self.num_remaining - self.num_taken
        arrived = sum(
            min(request_slice.count, max(0, self.num_arrived - first))
            for first, request_slice in self._slices_with_offset()
        )
        return arrived - self.num_taken

    def extend_rows(self, arrived: int, now: float) -> None:
        """Record that ``arrived`` rows have arrived in total."""
        self.num_arrived = arrived
        count, began = self._first
        self.row_rate = (arrived - count) / (now - began) if now > began else 0.0

    def keep_slices(self, indices: list[int]) -> None:
        """Drop all slices but those of these indices, before any row is taken."""
        self.slice_indices = indices
        self.slices = tuple(self.volume.slices[index] for index in indices)
        self.num_remaining = sum(request_slice.count for request_slice in self.slices)

    def take_rows(self, count: int) -> StepInput:
        """Take the next ``count`` available rows."""
        begin, end = self.num_taken, self.num_taken + count
        self.num_taken, self.is_running = end, True
        if count == self.num_rows:
            return StepInput(self.volume, self.data)
        slices, ranges, position = list[RequestSlice](), list[range](), 0
        for first, request_slice in self._slices_with_offset():
            low, high = max(begin, position), min(end, position + request_slice.count)
            if low < high:
                slices.append(clip_slice(request_slice, low - position, high - low))
                offset = first - position
                ranges.append(range(low + offset, high + offset))
            position += request_slice.count
        whole = self._remaining_volume()
        sub_chunk = (
            msgspec.structs.replace(whole, slices=tuple(slices)) if count < position else whole
        )
        low, high = ranges[0].start, ranges[-1].stop
        kept = None
        if high - low > count:
            kept = tuple(row - low for rows in ranges for row in rows)
        return StepInput(
            sub_chunk, self._slice_data(low, high), kept, whole, begin, end == position
        )

    def count_uncut(self, count: int, find_images: FindImages) -> int:
        """Adjust ``count`` rows so that no image is split; 0 means wait for the rest."""
        end = self.num_taken + count
        first = 0
        for request_slice in self.slices:
            last = first + request_slice.count
            if first < end < last:
                begin = max(first, self.num_taken)
                images = find_images(request_slice.request)
                start = request_slice.start + begin - first
                uncut = begin + count_uncut(images, start, end - begin) - self.num_taken
                # Rows before this slice can run without it.
                shorter = begin - self.num_taken
                return uncut if uncut <= self.num_available else shorter
            first = last
        return count

    def _slices_with_offset(self) -> Iterator[tuple[int, RequestSlice]]:
        """Yield the remaining slices, each with the index of its first row in arrival order."""
        first, left = 0, iter([*self.slice_indices, -1])
        wanted = next(left)
        for index, request_slice in enumerate(self.volume.slices):
            if index == wanted:
                yield first, request_slice
                wanted = next(left)
            first += request_slice.count

    def _remaining_volume(self) -> Volume:
        if len(self.slice_indices) == len(self.volume.slices):
            return self.volume
        return msgspec.structs.replace(self.volume, slices=self.slices)

    def _slice_data(self, low: int, high: int) -> object:
        """Return rows ``low`` to ``high`` of the data, without a copy if it is bytes."""
        if high - low == self.num_rows:
            return self.data
        if isinstance(self.data, bytes | bytearray | memoryview):
            each = len(self.data) // self.num_rows
            return memoryview(self.data)[low * each : high * each]
        return cast(Sequence[object], self.data)[low:high]


def clip_slice(request_slice: RequestSlice, first: int, count: int) -> RequestSlice:
    """Return ``count`` rows of a slice from its row ``first`` on.

    Block table updates and block copies stay with the first row, sampling with the last.
    """
    if count == request_slice.count:
        return request_slice
    return msgspec.structs.replace(
        request_slice,
        start=request_slice.start + first,
        count=count,
        blocks=() if first else request_slice.blocks,
        sample=request_slice.sample and first + count == request_slice.count,
        copy_from_block=-1 if first else request_slice.copy_from_block,
        drafts=(),
    )


class VolumeQueue:
    """Volumes of a stage by ``seq``, from the arrival of their first rows until they have run."""

    def __init__(
        self, complete: SeqSet, sub_chunk_policy: SubChunkPolicy, find_images: FindImages
    ) -> None:
        """``complete`` is the stage's set of complete numbers; the scoreboard adds to it.

        ``find_images`` returns the images of a request whose rows run in one step.
        """
        self._find_images = find_images
        self._complete = complete
        self._sub_chunk_policy = sub_chunk_policy
        self._volumes: dict[int, WaitingVolume] = {}
        #: Bytes of rows of volumes that are not fully taken.
        self.nbytes = 0

    def __contains__(self, seq: int) -> bool:
        return seq in self._volumes

    def __iter__(self) -> Iterator[WaitingVolume]:
        """Iterate by ascending ``seq``; volumes may be removed meanwhile."""
        if len(self._volumes) < 2:
            return iter(tuple(self._volumes.values()))
        return (self._volumes[seq] for seq in sorted(self._volumes))

    def __len__(self) -> int:
        return len(self._volumes)

    def get_volume(self, seq: int) -> WaitingVolume | None:
        """Return the volume of a ``seq``."""
        return self._volumes.get(seq)

    def add_volume(self, waiting: WaitingVolume) -> None:
        """Add a volume on arrival."""
        self._volumes[waiting.volume.seq] = waiting
        self.nbytes += waiting.nbytes

    def drop_volume(self, waiting: WaitingVolume) -> None:
        """Remove a volume that has not started."""
        del self._volumes[waiting.volume.seq]
        self.nbytes -= waiting.nbytes

    def take_rows(self, waiting: WaitingVolume, count: int) -> StepInput:
        """Take a volume's next ``count`` rows."""
        step_input = waiting.take_rows(count)
        if waiting.is_taken:
            self.nbytes -= waiting.nbytes
        return step_input

    def complete_sub_chunk(self, waiting: WaitingVolume) -> bool:
        """Complete the running sub-chunk; after the last, remove the volume and return ``True``."""
        waiting.is_running = False
        if waiting.is_taken:
            del self._volumes[waiting.volume.seq]
        return waiting.is_taken

    # --- queries ---------------------------------------------------------------------------------

    def next_rows(self, waiting: WaitingVolume, piggybacked: int = 0) -> int:
        """Return the rows of a volume's next sub-chunk; 0 if none can run.

        ``piggybacked`` decode rows run in the same pass.
        """
        if waiting.is_running or not self.is_ready(waiting):
            return 0
        available = waiting.num_available
        if not available:
            return 0
        pending = waiting.num_remaining - waiting.num_taken - available
        if waiting.volume.prefill:
            count = self._sub_chunk_policy.next_rows(
                available, pending, piggybacked, waiting.row_rate
            )
            return count and waiting.count_uncut(count, self._find_images)
        return 0 if pending else available

    def is_ready(self, waiting: WaitingVolume) -> bool:
        """Whether everything that a volume's remaining rows depend on is complete."""
        if not waiting.is_ready:
            waiting.is_ready = all(
                request_slice.after_seq in self._complete for request_slice in waiting.slices
            )
        return waiting.is_ready

    def started_seqs(self, request: int) -> set[int]:
        """Return the numbers of started volumes with rows of ``request``."""
        return {
            seq
            for seq, waiting in self._volumes.items()
            if waiting.is_started
            and any(request_slice.request == request for request_slice in waiting.slices)
        }

    @property
    def num_queued(self) -> int:
        """Number of volumes that run or could run."""
        if not self._volumes:
            return 0
        return sum(1 for each in self._volumes.values() if each.is_running or self.next_rows(each))

    @property
    def has_only_remainders(self) -> bool:
        """Whether every volume that could run has started."""
        return all(each.is_started for each in self._volumes.values() if self.next_rows(each))

    @property
    def num_waiting(self) -> int:
        """Number of volumes that are not fully taken."""
        return sum(1 for each in self._volumes.values() if not each.is_taken)

    def find_problems(self) -> Iterator[str]:
        """List broken invariants."""
        left = [waiting for waiting in self._volumes.values() if not waiting.is_taken]
        if self.nbytes != sum(waiting.nbytes for waiting in left):
            yield f"{self.nbytes} bytes are counted as waiting"
        for seq, waiting in self._volumes.items():
            if seq in self._complete:
                yield f"volume {seq} is complete but still queued"
            if waiting.num_available < 0 or not 1 <= waiting.num_arrived <= waiting.num_rows:
                taken, arrived = waiting.num_taken, waiting.num_arrived
                yield f"{taken} rows of volume {seq} were taken, of {arrived}"
            if not waiting.slice_indices:
                yield f"volume {seq} has no rows left"
            ready = all(
                request_slice.after_seq in self._complete for request_slice in waiting.slices
            )
            if (waiting.is_started or waiting.is_ready) and not ready:
                yield f"volume {seq} has started too early"
            if waiting.is_running != waiting.is_started and (
                waiting.is_running or waiting.is_taken
            ):
                yield f"volume {seq} has run but is not complete, or runs without rows"
