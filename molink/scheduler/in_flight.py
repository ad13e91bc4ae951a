"""Issues sequence numbers, and tracks the volumes and releases in flight."""

from dataclasses import dataclass

from molink.errors import InvariantError
from molink.wire.messages.data_plane import RequestSlice, Volume

#: Maximum numbers issued beyond the oldest in flight, since stages remember a bounded number.
MAX_SEQ_SPAN = 1 << 15


@dataclass(slots=True, eq=False)
class RoundTripCounter:
    """Counts ring iterations: consecutive volumes, each issued after the previous one's return."""

    mark_seq: int
    iterations: int = 1


class InFlightTracker:
    """Issues sequence numbers from 1 and tracks volumes and releases until they return."""

    def __init__(self) -> None:
        self.last_seq = 0
        #: Volumes in flight, in order of ``seq``.
        self._volumes: dict[int, Volume] = {}
        #: Issue times of all volumes, and of those that sample tokens.
        self._issued_at: dict[int, float] = {}
        self._awaited_at: dict[int, float] = {}
        self._releases: dict[int, RoundTripCounter | None] = {}
        self._cancel_counters: list[RoundTripCounter] = []
        self._counts = {True: 0, False: 0}
        #: Volumes of lookahead drafts only; ``count_volumes`` excludes them.
        self.num_lookahead = 0
        #: Rows of prefill volumes in flight.
        self.num_prefill_rows = 0
        self.cancel_iterations_last = 0
        self.cancel_iterations_max = 0

    def issue_seq(self) -> int:
        """Return the next sequence number."""
        self.last_seq += 1
        return self.last_seq

    def count_volumes(self, *, prefill: bool) -> int:
        """Count the prefill or decode volumes in flight."""
        return self._counts[prefill]

    def has_volume(self, seq: int) -> bool:
        """Whether the volume is in flight."""
        return seq in self._volumes

    @property
    def decode_volume_rows(self) -> list[int]:
        """Rows of each decode volume in flight, including lookahead."""
        return [volume.count for volume in self._volumes.values() if not volume.prefill]

    @property
    def is_window_full(self) -> bool:
        """Whether the oldest number in flight is so old that no more may be issued."""
        oldest = min(
            next(iter(self._volumes), self.last_seq), next(iter(self._releases), self.last_seq)
        )
        return self.last_seq - oldest >= MAX_SEQ_SPAN

    @property
    def oldest_awaited_at(self) -> float | None:
        """Issue time of the oldest volume in flight that samples tokens."""
        return next(iter(self._awaited_at.values()), None)

    def record_volume(self, volume: Volume, now: float) -> None:
        """Record an issued volume."""
        self._volumes[volume.seq] = volume
        self._issued_at[volume.seq] = now
        if _is_lookahead(volume):
            self.num_lookahead += 1
        else:
            if any(request_slice.sample for request_slice in volume.slices):
                self._awaited_at[volume.seq] = now
            self._counts[volume.prefill] += 1
        self.num_prefill_rows += _prefill_rows(volume)

    def pop_volume(self, seq: int) -> tuple[tuple[RequestSlice, ...], float] | None:
        """Remove a returned volume; return its slices and issue time, ``None`` if not in flight."""
        volume = self._volumes.pop(seq, None)
        if volume is None:
            return None
        if _is_lookahead(volume):
            self.num_lookahead -= 1
        else:
            self._counts[volume.prefill] -= 1
        self.num_prefill_rows -= _prefill_rows(volume)
        for counter in self._cancel_counters:
            if seq > counter.mark_seq:
                counter.iterations += 1
                counter.mark_seq = self.last_seq
        self._awaited_at.pop(seq, None)
        return volume.slices, self._issued_at.pop(seq)

    def start_cancel(self) -> RoundTripCounter:
        """Start counting the iterations until a cancelled request's blocks return."""
        counter = RoundTripCounter(self.last_seq)
        self._cancel_counters.append(counter)
        return counter

    def record_release(self, seq: int, counter: RoundTripCounter | None) -> None:
        """Record an issued release, with the counter of its cancellation, if any."""
        self._releases[seq] = counter

    def pop_release(self, seq: int) -> bool:
        """Remove a returned release; ``False`` if it is not in flight."""
        if seq not in self._releases:
            return False
        counter = self._releases.pop(seq)
        if counter is not None:
            self._cancel_counters.remove(counter)
            self.cancel_iterations_last = counter.iterations
            self.cancel_iterations_max = max(self.cancel_iterations_max, counter.iterations)
        return True

    def seqs_of_request(self, request: int) -> set[int]:
        """Return the volumes in flight with rows of ``request``."""
        return {
            seq
            for seq, volume in self._volumes.items()
            if any(request_slice.request == request for request_slice in volume.slices)
        }

    def validate(self) -> None:
        """Check that counts match the volumes in flight.

        Raises:
            InvariantError: they don't.
        """
        ahead = [volume for volume in self._volumes.values() if _is_lookahead(volume)]
        if len(ahead) != self.num_lookahead:
            raise InvariantError(
                f"{len(ahead)} lookahead volumes in flight, not {self.num_lookahead}"
            )
        for prefill, count in self._counts.items():
            volumes = [each for each in self._volumes.values() if each not in ahead]
            there = sum(1 for volume in volumes if volume.prefill is prefill)
            if there != count:
                raise InvariantError(
                    f"{there} volumes (prefill: {prefill}) are in flight, not {count}"
                )
        if self.num_prefill_rows != sum(map(_prefill_rows, self._volumes.values())):
            raise InvariantError(f"{self.num_prefill_rows} prefill rows are not those in flight")
        if max([*self._volumes, *self._releases], default=0) > self.last_seq:
            raise InvariantError(f"a seq in flight exceeds the last one issued, {self.last_seq}")


def _prefill_rows(volume: Volume) -> int:
    return sum(request_slice.count for request_slice in volume.slices) if volume.prefill else 0


def _is_lookahead(volume: Volume) -> bool:
    return all(request_slice.is_lookahead for request_slice in volume.slices)
