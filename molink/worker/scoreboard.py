"""The tick scoreboard: what a stage may run, drop, forward and forget.

One per stage and epoch, sans-IO. Messages of the two lanes arrive in any interleaving, each lane in
its order; ticks say what has to come before what. At one stage a tick is *complete*

- of an ``Admit``, ``History`` or ``Table``: when it arrives (they share a lane, so in the order of
  issue);
- of a ``Volume``: when its rows have run, or at once when none of its rows is left to run;
- of a ``Tombstone``: when it arrives (an earlier stage completed that volume without running it);
- of a ``Release``: when all of ``after`` and ``also`` are complete.

**Running.** A volume may run once the ``after`` ticks of all its remaining rows are complete. They
include, directly or through earlier rows, the ticks that admit the request.

**Dropping.** From the moment a request's ``Release`` arrives, its rows in volumes that wait or are
still to come are dropped; rows that are running finish. A volume that loses all rows is *buried*:
it completes, and a ``Tombstone`` goes on in its stead on the control lane. A volume that loses some
goes on with the others. Later stages need not know that rows were dropped, since the tick completes
there whichever way it arrives.

**Forgetting.** The head's ``Release`` names every tick with rows of the request that had not come
back; those that had are complete at every stage. Once all of the named ones are complete here, no
row of the request can arrive any more, so the request is forgotten, and only then does the
``Release`` go on. (``after`` alone would not do: the last tick can be buried upstream and overtake,
on the control lane, an earlier volume of the same request on the bulk lane.) When it has gone
round, no stage will touch the request's blocks again. Nothing is kept of forgotten requests: ids
rise with admission, so an id at or below the highest one admitted that is not live is over.

**Sharing.** Rows of one request may read blocks that another one writes, or copy from them, if
their ``after`` covers those writes and the writer is not released before they have come back:
dropped rows write nothing. The head's prefix cache has only what has come back by the time that it
admits the reader, so that ``after`` need not name it.

**Misbehaviour** of other stages is counted, noted in the story, and never wedges this one. A
message that makes no sense becomes a tombstone: its tick completes here and further on, and the
head, which knows what it sent, fails the requests concerned. So for a volume with an ``after`` not
before itself or the same request twice; for rows whose ``after`` is complete but whose request was
never admitted, or whose block table does not hold them or is no honest one, or that copy from no
honest block; for an ``Admit`` of an id that is not new; for a ``History`` or ``Table`` of a request
that is not live, or that is not the next ids of it, no blocks, or late; for whatever exceeds the
:class:`BoardLimits`, which keep the memory of this stage bounded. A tick that was seen already, or
is absurdly far ahead, is ignored. A ``Release`` of a request that is not live completes like any
other, and such a request can't be admitted later; ticks in it that are not before it are left out.
Misuse by our own shell (completing what was not taken) raises ``InvariantError``.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from molink.errors import InvariantError
from molink.head.story import Story
from molink.wire.data import Admit, History, Release, Rows, Table, Tombstone, Volume
from molink.worker.tickset import TickSet
from molink.worker.work import Control, ControlBody, Ready, Work, block_ids

#: A tick further than this above the watermark is no honest message; the head keeps to half of it.
MAX_SPAN = 1 << 16
#: What is counted and no misbehaviour: of cancelled requests, and resent messages.
_HONEST = ("dropped_groups", "buried_volumes", "duplicates")
#: Volumes that may wait; the head has at most 128 in flight.
MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class BoardLimits:
    """What an honest ring never exceeds, or a step would fail, or memory run out.

    ``requests`` counts those admitted and not forgotten, ``waiting_bytes`` the rows of volumes that
    have arrived and were not taken. ``context`` tokens and ``table`` blocks are those of one
    request; ``blocks`` of ``block_size`` tokens are in the KV pool.
    """

    requests: int = 1 << 16
    context: int = 1 << 24
    table: int = 1 << 24
    blocks: int = 1 << 31
    block_size: int = 1 << 16
    waiting_bytes: int = 256 << 20


@dataclass(slots=True)
class _Live:
    """A request: ids of its history, blocks of its table, and whether rows of it were taken."""

    ids: int = 0
    blocks: int = 0
    begun: bool = False


@dataclass(slots=True)
class _Waiting:
    """A volume that has arrived; ``kept`` are indices of its row groups that remain."""

    volume: Volume
    data: object
    kept: list[int]

    @property
    def nbytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes | bytearray | memoryview) else 0

    def rows(self) -> Iterator[Rows]:
        return (self.volume.rows[index] for index in self.kept)


class Scoreboard:
    """Orders one stage's work during one epoch; see the module for the rules."""

    def __init__(self, limits: BoardLimits | None = None) -> None:
        self._limits = limits or BoardLimits()
        self.counts: Counter[str] = Counter()
        #: Progress of the compute thread: rises with every volume that has run. It is the tick of
        #: the latest one, or one more than before where an older tick ran after a younger one.
        self.last_completed = 0
        self._complete = TickSet()
        #: Admitted and not known to be over.
        self._live: dict[int, _Live] = {}
        self._highest_id = -1
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_bytes = 0
        self._running: dict[int, Volume] = {}
        #: Releases that wait, each with the ticks it waits for.
        self._releases: dict[int, tuple[Release, set[int]]] = {}
        self._outbox: list[Control] = []
        self._story = Story()

    def arrive(self, body: ControlBody | Volume, data: object, now: float) -> None:
        """A message is here, whole; ``data`` is kept with it and handed out again.

        Call ``complete((), now)`` afterwards: controls may have been completed by it.
        """
        if not self._is_new(body.tick, now):
            return
        self._story.add(now, "arrive", type(body).__name__, body.tick)
        match body:
            case Volume():
                self._arrive_volume(body, data, now)
            case Release():
                self._arrive_release(body, now)
            case Admit():
                self._arrive_admit(body, now)
            case History():
                self._arrive_history(body, data, now)
            case Table():
                self._arrive_table(body, data, now)
            case Tombstone():
                self._finish(body, None)
        self._settle(now)

    def take(self, now: float) -> Work | None:
        """What may run now, lowest ticks first; ``None`` if nothing.

        Calling it again before ``complete`` is allowed and gives further work.
        """
        parts: dict[bool, Ready] = {}
        for tick in sorted(self._waiting):
            waiting = self._waiting[tick]
            kind = waiting.volume.prefill
            if kind in parts or not self._is_ready(waiting):
                continue
            self._drop_unfit(waiting, now)
            if waiting.kept:
                self._unqueue(tick)
                self._running[tick] = waiting.volume
                parts[kind] = Ready.of(waiting.volume, waiting.data, waiting.kept)
        self._settle(now)
        if not parts:
            return None
        work = Work(parts.get(False), parts.get(True))
        self._story.add(now, "take", *work.ticks)
        return work

    def complete(self, ticks: Iterable[int], now: float) -> list[Control]:
        """The volumes ``ticks`` have run; returns the controls to be forwarded now, in order.

        Raises:
            InvariantError: one of them was not taken.
        """
        for tick in ticks:
            if self._running.pop(tick, None) is None:
                raise InvariantError(f"tick {tick} completed but not taken", self._story.lines())
            self._complete.add(tick)
            self.last_completed = max(tick, self.last_completed + 1)
            self._story.add(now, "complete", tick)
        self._settle(now)
        outbox, self._outbox = self._outbox, []
        return outbox

    @property
    def queued(self) -> int:
        """Volumes that wait for the compute thread or are in it, not for anything else."""
        ready = sum(1 for waiting in self._waiting.values() if self._is_ready(waiting))
        return ready + len(self._running)

    @property
    def waiting(self) -> int:
        """Volumes that have arrived and were not taken, ready or not."""
        return len(self._waiting)

    @property
    def refused(self) -> int:
        """Messages of other stages that made no sense, or were too many."""
        return self.counts.total() - sum(self.counts[what] for what in _HONEST)

    def validate(self) -> None:
        """Check all invariants.

        Raises:
            InvariantError: one is broken; carries the last transitions.
        """
        for problem in self._problems():
            raise InvariantError(problem, self._story.lines())

    # --- arrivals ------------------------------------------------------------------------------

    def _is_new(self, tick: int, now: float) -> bool:
        if (
            tick in self._complete
            or tick in self._waiting
            or tick in self._running
            or tick in self._releases
        ):
            self._count("duplicates", tick, now)
            return False
        if tick > self._complete.watermark + MAX_SPAN:
            self._count("far_ticks", tick, now)
            return False
        return True

    def _arrive_volume(self, volume: Volume, data: object, now: float) -> None:
        requests = {rows.request for rows in volume.rows}
        if len(requests) < len(volume.rows) or any(
            rows.after >= volume.tick for rows in volume.rows
        ):
            self._refuse(volume.tick, "bad_volumes", now)
            return
        waiting = _Waiting(volume, data, list(range(len(volume.rows))))
        room = self._limits.waiting_bytes - self._waiting_bytes
        if len(self._waiting) >= MAX_WAITING or waiting.nbytes > room:
            self._refuse(volume.tick, "floods", now)
        else:
            self._waiting[volume.tick] = waiting
            self._waiting_bytes += waiting.nbytes
            self._drop_gone(waiting)

    def _arrive_admit(self, admit: Admit, now: float) -> None:
        if admit.request <= self._highest_id:
            self._refuse(admit.tick, "stale_admits", now)
        elif len(self._live) + len(self._releases) >= self._limits.requests:
            self._refuse(admit.tick, "floods", now)
        else:
            self._highest_id = admit.request
            self._live[admit.request] = _Live()
            self._finish(admit, None)

    def _arrive_history(self, history: History, data: object, now: float) -> None:
        live, payload = self._live.get(history.request), history.payload
        if live is None:
            self._refuse(history.tick, "stray_histories", now)
            return
        end = history.first + payload.shape[0]
        proper = payload.dtype == "i32" and len(payload.shape) == 1 and history.first == live.ids
        if not proper or end > self._limits.context:
            self._refuse(history.tick, "bad_histories", now)
            return
        live.ids = end
        self._finish(history, data)

    def _arrive_table(self, table: Table, data: object, now: float) -> None:
        live = self._live.get(table.request)
        if live is None:
            self._refuse(table.tick, "stray_tables", now)
            return
        blocks = block_ids(table, data)
        end = live.blocks + len(blocks)
        proper = len(blocks) and min(blocks) >= 0 and max(blocks) < self._limits.blocks
        if not proper or live.begun or end > self._limits.table:
            self._refuse(table.tick, "bad_tables", now)
            return
        live.blocks = end
        self._finish(table, data)

    def _arrive_release(self, release: Release, now: float) -> None:
        named = {release.after, *release.also}
        earlier = {tick for tick in named if tick < release.tick}
        if len(earlier) < len(named):
            self._count("bad_releases", release.tick, now)
        if release.request not in self._live:
            self._count("stray_releases", release.tick, now)
        if len(self._releases) >= self._limits.requests:
            self._refuse(release.tick, "floods", now)
            return
        self._live.pop(release.request, None)
        # Admitted after its release, it would be forgotten in the midst of its rows.
        self._highest_id = max(self._highest_id, release.request)
        earlier |= self._running_for(release.request)
        self._releases[release.tick] = release, self._complete.missing(earlier)
        for waiting in list(self._waiting.values()):
            self._drop_gone(waiting)

    # --- completion ----------------------------------------------------------------------------

    def _finish(self, body: ControlBody, data: object) -> None:
        """A control is complete and goes on."""
        self._complete.add(body.tick)
        self._outbox.append(Control(body, data))

    def _refuse(self, tick: int, what: str, now: float) -> None:
        """A message that makes no sense completes without effect, here and further on."""
        self._count(what, tick, now)
        self._finish(Tombstone(tick), None)

    def _settle(self, now: float) -> None:
        """Complete the releases that wait for nothing any more."""
        settled = True
        while settled and self._releases:
            settled = False
            for tick, (release, missing) in list(self._releases.items()):
                missing.intersection_update(self._complete.missing(missing))
                if not missing:
                    del self._releases[tick]
                    self._finish(release, None)
                    self._story.add(now, "forget", release.request)
                    settled = True

    # --- rows ----------------------------------------------------------------------------------

    def _is_ready(self, waiting: _Waiting) -> bool:
        return all(rows.after in self._complete for rows in waiting.rows())

    def _is_gone(self, request: int) -> bool:
        return request <= self._highest_id and request not in self._live

    def _running_for(self, request: int) -> set[int]:
        """Ticks with rows of ``request`` that run; an honest release of it names them."""
        running = self._running.items()
        return {tick for tick, volume in running if any(r.request == request for r in volume.rows)}

    def _drop_gone(self, waiting: _Waiting) -> None:
        rows = waiting.volume.rows
        kept = [index for index in waiting.kept if not self._is_gone(rows[index].request)]
        self._keep(waiting, kept, "dropped_groups")

    def _drop_unfit(self, waiting: _Waiting, now: float) -> None:
        """Drop rows of requests that were never admitted, and those that can't be computed."""
        rows = waiting.volume.rows
        kept = [index for index in waiting.kept if self._is_fit(rows[index])]
        if len(kept) < len(waiting.kept):
            self._story.add(now, "unfit", waiting.volume.tick)
        self._keep(waiting, kept, "unfit_groups")

    def _is_fit(self, rows: Rows) -> bool:
        live, limits, end = self._live.get(rows.request), self._limits, rows.start + rows.count
        if live is None or any(block >= limits.blocks for block in rows.blocks):
            return False
        if rows.source >= limits.blocks:
            return False
        if rows.source >= 0 and rows.start % limits.block_size == 0:
            return False
        table = live.blocks + len(rows.blocks)
        if table > limits.table or end > min(limits.context, table * limits.block_size):
            return False
        live.blocks, live.begun = table, True
        return True

    def _keep(self, waiting: _Waiting, kept: list[int], what: str) -> None:
        """Drop all but ``kept``; bury the volume if nothing remains."""
        dropped = len(waiting.kept) - len(kept)
        if not dropped:
            return
        self.counts[what] += dropped
        waiting.kept = kept
        if not kept:
            tick = waiting.volume.tick
            self._unqueue(tick)
            self.counts["buried_volumes"] += 1
            self._finish(Tombstone(tick), None)

    def _unqueue(self, tick: int) -> None:
        self._waiting_bytes -= self._waiting.pop(tick).nbytes

    def _count(self, what: str, tick: int, now: float) -> None:
        self.counts[what] += 1
        self._story.add(now, what, tick)

    def _problems(self) -> Iterator[str]:
        places = [*self._waiting, *self._running, *self._releases]
        if len(set(places)) < len(places):
            yield "a tick is in two places"
        done = [tick for tick in places if tick in self._complete]
        if done:
            yield f"ticks {done} are complete but still waited for"
        if any(request > self._highest_id for request in self._live):
            yield "a request is live that was never admitted"
        for tick, waiting in self._waiting.items():
            if not waiting.kept or any(self._is_gone(rows.request) for rows in waiting.rows()):
                yield f"volume {tick} keeps rows of requests that are over, or none"
        if any(not self._complete.missing(missing) for _, missing in self._releases.values()):
            yield "a release waits for nothing"
        if self._waiting_bytes != sum(waiting.nbytes for waiting in self._waiting.values()):
            yield f"{self._waiting_bytes} bytes wait, say the counters"
        if len(self._complete) > MAX_SPAN:
            yield "ticks far above the watermark are remembered"
