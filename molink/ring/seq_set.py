"""Which seqs a stage has completed, and the releases that wait for some of them."""

from collections.abc import Iterable, Iterator

from molink.wire.messages.data_plane import Release


class SeqSet:
    """Seqs from 1 on: a watermark below which all are in, and the few that are in above it.

    Seqs are dense (each number is used once), so the watermark follows and memory stays bounded by
    how far seqs overtake each other. Seq 0 stands for "before anything" and is always in.
    """

    def __init__(self) -> None:
        #: Every seq up to and including this one is in.
        self.watermark = 0
        self._above: set[int] = set()

    def __contains__(self, seq: int) -> bool:
        return seq <= self.watermark or seq in self._above

    def __len__(self) -> int:
        """Seqs that are kept one by one."""
        return len(self._above)

    def add_seq(self, seq: int) -> None:
        """Put ``seq`` in."""
        if seq <= self.watermark:
            return
        self._above.add(seq)
        while self.watermark + 1 in self._above:
            self.watermark += 1
            self._above.remove(self.watermark)

    def find_missing(self, seqs: Iterable[int]) -> set[int]:
        """Those of ``seqs`` that are not in."""
        return {seq for seq in seqs if seq not in self}


class PendingReleases:
    """Releases that a stage can't complete yet, each with the seqs it waits for."""

    def __init__(self, complete: SeqSet) -> None:
        """``complete`` are the stage's seqs, which somebody else adds to."""
        self._complete = complete
        self._waiting: dict[int, tuple[Release, set[int]]] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add_release(self, release: Release, seqs: set[int]) -> None:
        """One that is complete once all of ``seqs`` are."""
        self._waiting[release.seq] = release, self._complete.find_missing(seqs)

    def pop_complete(self) -> Iterator[Release]:
        """Remove those that wait for nothing any more.

        Each is to be completed before the next is asked for: others may wait for it.
        """
        found = True
        while found:
            found = False
            for seq, (release, missing) in list(self._waiting.items()):
                missing.intersection_update(self._complete.find_missing(missing))
                if not missing:
                    del self._waiting[seq]
                    yield release
                    found = True

    def find_problems(self) -> Iterator[str]:
        """What must not be."""
        for seq, (_, missing) in self._waiting.items():
            if seq in self._complete:
                yield f"release {seq} is complete but still waited for"
            if not self._complete.find_missing(missing):
                yield f"release {seq} waits for nothing"
