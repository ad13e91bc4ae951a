"""The volumes that a stage has and has not completed."""

from collections.abc import Iterator

from molink.ring.seq_set import SeqSet
from molink.ring.step import StepInput
from molink.ring.sub_chunks import SubChunkPolicy
from molink.ring.waiting_volume import WaitingVolume


class VolumeQueue:
    """By seq, from a volume's first rows on until it has run or is buried."""

    def __init__(self, complete: SeqSet, sub_chunk_policy: SubChunkPolicy) -> None:
        """``complete`` are the stage's seqs, which somebody else adds to."""
        self._complete = complete
        self._sub_chunk_policy = sub_chunk_policy
        self._volumes: dict[int, WaitingVolume] = {}
        #: Bytes of rows of those that were not taken whole.
        self.nbytes = 0

    def __contains__(self, seq: int) -> bool:
        return seq in self._volumes

    def __iter__(self) -> Iterator[WaitingVolume]:
        """Lowest seqs first; they may be removed meanwhile."""
        if len(self._volumes) < 2:
            return iter(tuple(self._volumes.values()))
        return (self._volumes[seq] for seq in sorted(self._volumes))

    def __len__(self) -> int:
        return len(self._volumes)

    def get_volume(self, seq: int) -> WaitingVolume | None:
        """That of a seq."""
        return self._volumes.get(seq)

    def add_volume(self, waiting: WaitingVolume) -> None:
        """One has come."""
        self._volumes[waiting.volume.seq] = waiting
        self.nbytes += waiting.nbytes

    def drop_volume(self, waiting: WaitingVolume) -> None:
        """None of its rows will run, and none has."""
        del self._volumes[waiting.volume.seq]
        self.nbytes -= waiting.nbytes

    def take_rows(self, waiting: WaitingVolume, count: int) -> StepInput:
        """Hand out its next ``count`` rows."""
        step_input = waiting.take_rows(count)
        if waiting.is_taken:
            self.nbytes -= waiting.nbytes
        return step_input

    def complete_sub_chunk(self, waiting: WaitingVolume) -> bool:
        """What was taken of it has run; whether that was its last piece. If so, it is gone."""
        waiting.is_running = False
        if waiting.is_taken:
            del self._volumes[waiting.volume.seq]
        return waiting.is_taken

    # --- questions -----------------------------------------------------------------------------

    def next_rows(self, waiting: WaitingVolume, piggybacked: int = 0) -> int:
        """Rows of its next piece beside ``riding`` decode rows; 0 if it can't run now."""
        if waiting.is_running or not self.is_ready(waiting):
            return 0
        available = waiting.num_available
        if not available:
            return 0
        pending = waiting.num_remaining - waiting.num_taken - available
        if waiting.volume.prefill:
            return self._sub_chunk_policy.next_rows(
                available, pending, piggybacked, waiting.row_rate
            )
        return 0 if pending else available

    def is_ready(self, waiting: WaitingVolume) -> bool:
        """Whether all is complete that its remaining rows come after."""
        if not waiting.is_ready:
            waiting.is_ready = all(
                request_slice.after_seq in self._complete for request_slice in waiting.slices
            )
        return waiting.is_ready

    def started_seqs(self, request: int) -> set[int]:
        """Seqs of those that have begun and have rows of ``request``."""
        return {
            seq
            for seq, waiting in self._volumes.items()
            if waiting.is_started
            and any(request_slice.request == request for request_slice in waiting.slices)
        }

    @property
    def num_queued(self) -> int:
        """Those that run, or could."""
        if not self._volumes:
            return 0
        return sum(1 for each in self._volumes.values() if each.is_running or self.next_rows(each))

    @property
    def has_only_remainders(self) -> bool:
        """Whether all that could run have begun."""
        return all(each.is_started for each in self._volumes.values() if self.next_rows(each))

    @property
    def num_waiting(self) -> int:
        """Those that were not taken whole."""
        return sum(1 for each in self._volumes.values() if not each.is_taken)

    def find_problems(self) -> Iterator[str]:
        """What must not be."""
        left = [waiting for waiting in self._volumes.values() if not waiting.is_taken]
        if self.nbytes != sum(waiting.nbytes for waiting in left):
            yield f"{self.nbytes} bytes wait, say the counters"
        for seq, waiting in self._volumes.items():
            if seq in self._complete:
                yield f"volume {seq} is complete but still waited for"
            if waiting.num_available < 0 or not 1 <= waiting.num_arrived <= waiting.num_rows:
                taken, arrived = waiting.num_taken, waiting.num_arrived
                yield f"{taken} rows of volume {seq} were taken, of {arrived}"
            if not waiting.slice_indices:
                yield f"volume {seq} has no rows left"
            ready = all(
                request_slice.after_seq in self._complete for request_slice in waiting.slices
            )
            if (waiting.is_started or waiting.is_ready) and not ready:
                yield f"volume {seq} has begun too early"
            if waiting.is_running != waiting.is_started and (
                waiting.is_running or waiting.is_taken
            ):
                yield f"volume {seq} has run but is not complete, or runs without rows"
