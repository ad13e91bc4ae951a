"""What waits to be sent on a link: control messages, probes and the rows of volumes."""

from collections import deque
from itertools import count

from molink.errors import WireError
from molink.link.policies.base import Produced, SendRows
from molink.link.volume import UnsentVolume
from molink.link.window import size_of
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data import Lane, Probe, RingBody, Volume, VolumePart


class LinkQueues:
    """Queues of one link, and what its policy has granted of the volumes."""

    def __init__(self) -> None:
        self._control: deque[tuple[RingBody, Buffer | None]] = deque()
        self._probes: deque[Buffer] = deque()
        #: Volumes of which rows are still to be sent, by the name that the policy knows.
        self._volumes: dict[int, UnsentVolume] = {}
        #: Those of which rows are still to be handed over, by tick.
        self._unfinished: dict[int, int] = {}
        self._names = count()
        #: What the policy has granted and has not left yet, by lane: volume and rows.
        self._grants: dict[Lane, tuple[int, int]] = {}
        #: Bytes of everything here.
        self.nbytes = 0

    # --- in ----------------------------------------------------------------------------------

    def control(self, body: RingBody, payload: Buffer | None) -> None:
        """A message that goes before every volume, on the decode lane."""
        self._control.append((body, payload))
        self.nbytes += size_of(payload)

    def probe(self, payload: Buffer) -> None:
        """Bytes that go before every volume on the bulk lane."""
        self._probes.append(payload)
        self.nbytes += size_of(payload)

    def volume(self, volume: UnsentVolume, rows: Buffer) -> Produced:
        """A volume with its first rows, or all.

        Raises:
            WireError: they are not its rows, or an earlier volume of that tick lacks rows.
        """
        tick = volume.header.tick
        if tick in self._unfinished:
            raise WireError(f"volume {tick} begins again before its end")
        return self._add(next(self._names), volume, rows)

    def more(self, tick: int, rows: Buffer) -> Produced:
        """The next rows of a volume.

        Raises:
            WireError: no volume of that tick lacks rows, or they are more than it lacks.
        """
        name = self._unfinished.get(tick)
        if name is None:
            raise WireError(f"rows of volume {tick}, which lacks none")
        return self._add(name, self._volumes[name], rows)

    def _add(self, name: int, volume: UnsentVolume, rows: Buffer) -> Produced:
        added, tick = volume.add(rows), volume.header.tick
        self._volumes[name] = volume
        self.nbytes += added * volume.row_bytes
        if volume.given < volume.total:
            self._unfinished[tick] = name
        else:
            self._unfinished.pop(tick, None)
        kind = Lane.BULK if volume.header.prefill else Lane.DECODE
        return Produced(name, kind, added, volume.row_bytes)

    # --- out ---------------------------------------------------------------------------------

    def take_control(self) -> tuple[RingBody, Buffer | None] | None:
        """The oldest control message."""
        if not self._control:
            return None
        body, payload = self._control.popleft()
        self.nbytes -= size_of(payload)
        return body, payload

    def take_probe(self) -> tuple[Probe, Buffer] | None:
        """The oldest probe."""
        if not self._probes:
            return None
        payload = self._probes.popleft()
        self.nbytes -= size_of(payload)
        return Probe(Payload("u8", (memoryview(payload).nbytes,))), payload

    def grant(self, decision: SendRows) -> bool:
        """Let rows go: those that are there, however many the policy says; ``False`` if none."""
        volume = self._volumes.get(decision.volume)
        rows = min(decision.rows, volume.available) if volume is not None else 0
        if volume is not None and rows > 0:
            self._grants[volume.lane] = (decision.volume, rows)
        return rows > 0

    def granted(self, lane: Lane) -> UnsentVolume | None:
        """The volume of which rows may go on ``lane``."""
        return self._volumes[self._grants[lane][0]] if lane in self._grants else None

    def take_rows(self, lane: Lane, maximum: int) -> tuple[Volume | VolumePart, memoryview]:
        """The next message of what was granted: at most ``maximum`` bytes, but one row at least."""
        name, granted = self._grants.pop(lane)
        volume = self._volumes[name]
        body, data, rows = volume.cut(granted, maximum)
        self.nbytes -= data.nbytes
        if granted > rows:
            self._grants[lane] = (name, granted - rows)
        if volume.sent == volume.total:
            del self._volumes[name]
        return body, data

    # --- state -------------------------------------------------------------------------------

    def nbytes_on(self, lane: Lane) -> int:
        """Bytes of everything here that is to go on ``lane``."""
        first = self._probes if lane is Lane.BULK else (payload for _, payload in self._control)
        rows = sum(volume.nbytes for volume in self._volumes.values() if volume.lane is lane)
        return rows + sum(size_of(payload) for payload in first)

    def fault(self) -> str:
        """Which invariant doesn't hold; empty if all do."""
        if not all(volume.valid() for volume in self._volumes.values()):
            return "a volume miscounts its rows"
        lacking = {v.header.tick: name for name, v in self._volumes.items() if v.given < v.total}
        if lacking != self._unfinished:
            return "volumes that lack rows are not known by tick"
        waiting = sum(volume.nbytes for volume in self._volumes.values())
        waiting += sum(size_of(payload) for _, payload in self._control)
        waiting += sum(size_of(payload) for payload in self._probes)
        if waiting != self.nbytes:
            return f"{waiting} bytes wait, not {self.nbytes}"
        for name, rows in self._grants.values():
            there = self._volumes[name].available if name in self._volumes else 0
            if not 0 < rows <= there:
                return f"a grant of {rows} rows of {there}: {name}"
        return ""
