"""The tick scoreboard: what a stage may run, drop, forward and forget.

One per stage and epoch, sans-IO. Messages of the two lanes arrive in any interleaving, each lane in
its order; ticks say what has to come before what. At one stage a tick is *complete*

- of an ``Admit``, ``Grammar``, ``History``, ``Table``, ``SwapOut`` or ``SwapIn``: when it arrives
  (they share a lane, so in the order of issue; what a swap copies is copied in this order, before
  any step that is taken later);
- of a ``Volume``: when all of its rows have run, or at once when none is left to run;
- of a ``Tombstone``: when it arrives (an earlier stage completed that volume without running it);
- of a ``Release``: when all of ``after`` and ``also`` are complete.

**Running.** A volume may run once the ``after`` ticks of all its remaining rows are complete. They
include, directly or through earlier rows, the ticks that admit the request.

**Pieces.** The rows of a prefill volume may arrive little by little, in order, and run so, a piece
of consecutive rows at a time, as large as :mod:`molink.ring.pieces` says. With its first piece a
volume has *begun*. All of its row groups go on to the next stage in the header of that piece, so it
keeps them until its last row has run; only then its tick is complete, and what comes ``after`` it
may run. What is done once for a group (its fitness, its blocks) is done at the beginning.

**Dropping.** From the moment a request's ``Release`` arrives, its rows in volumes that wait or are
still to come are dropped; rows of volumes that have begun run to the end. A volume that loses all
rows is *buried*: it completes, and a ``Tombstone`` goes on in its stead on the control lane; rows
of it that still arrive are ignored. A volume that loses some goes on with the others. Later stages
need not know that rows were dropped, since the tick completes there whichever way it arrives.

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
before itself, the same request twice, or drafts that can't be sampled or reported; for rows whose
``after`` is complete but whose request was never admitted or has earlier rows that are not
complete, or whose block table does not hold them or is no honest one, or that copy from no honest
block; for an ``Admit`` of an id that is not new; for
a ``History`` or ``Table`` of a request that is not live, or that is not the next ids of it, no
blocks, or late; for whatever exceeds the ``BoardLimits``, which keep the
memory of this stage bounded. A tick that was seen already, or is absurdly far ahead, is ignored;
so are further rows of a volume that never came, or has had as many. A ``Release`` of a request that
is not live completes like any other, and such a request can't be admitted later; ticks in it that
are not before it are left out. Misuse by our own shell (completing what was not taken) raises
``InvariantError``.

A ``Grammar`` is refused as a ``History`` is, and where it is a second one. A ``SwapOut`` is refused
of a request that is not live or has rows that are not complete, and of blocks, here or in host
memory, that don't exist or are named twice; a ``SwapIn`` also if the host blocks hold anything else
than what the order that it names has brought there. No row of a request runs whose ``SwapIn`` was
refused.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from molink.errors import InvariantError
from molink.facts.story import Story
from molink.ring.hosted import HostLedger, are_distinct
from molink.ring.known import BoardLimits, KnownRequests, has_honest_drafts
from molink.ring.pieces import Cutting, WholeVolumes
from molink.ring.ticks import Releases, TickSet
from molink.ring.volumes import Volumes
from molink.ring.waiting import WaitingVolume
from molink.ring.work import Control, ControlBody, Segment, Work, block_copy, block_ids
from molink.wire.messages.data import (
    Admit,
    Grammar,
    History,
    Release,
    SwapIn,
    SwapOut,
    Table,
    Tombstone,
    Volume,
)

#: A tick further than this above the watermark is no honest message; the head keeps to half of it.
MAX_SPAN = 1 << 16
#: What is counted and no misbehaviour: of cancelled requests, and resent messages.
_HONEST = ("dropped_groups", "buried_volumes", "duplicates")
#: Volumes that may wait; the head has at most 128 in flight.
MAX_WAITING = 1024


class Scoreboard:
    """Orders one stage's work during one epoch; see the module for the rules."""

    def __init__(self, limits: BoardLimits | None = None, cutting: Cutting | None = None) -> None:
        """``cutting`` decides on pieces of prefill volumes; without it volumes run whole."""
        self._limits = limits or BoardLimits()
        self.counts: Counter[str] = Counter()
        #: Progress of the compute thread: rises with every piece that has run. After the last piece
        #: of a volume it is its tick at least.
        self.last_completed = 0
        self._complete = TickSet()
        self._known = KnownRequests(self._limits, self._complete)
        self._hosted = HostLedger(self._limits.host_blocks)
        self._volumes = Volumes(self._complete, cutting or WholeVolumes())
        self._releases = Releases(self._complete)
        self._outbox: list[Control] = []
        self._story = Story()

    def arrive(
        self, body: ControlBody | Volume, data: object, now: float, rows: int | None = None
    ) -> None:
        """A message is here; ``data`` is kept with it and handed out again.

        ``rows`` is how many rows of a volume have arrived, ``None`` if all; ``data`` has room for
        all of them. Call ``complete((), now)`` afterwards: controls may have been completed by it.
        """
        if not self._is_new(body.tick, now):
            return
        self._story.add(now, "arrive", type(body).__name__, body.tick)
        match body:
            case Volume():
                self._arrive_volume(body, data, rows, now)
            case Release():
                self._arrive_release(body, now)
            case Admit():
                self._arrive_admit(body, now)
            case Grammar():
                self._arrive_grammar(body, data, now)
            case History():
                self._arrive_history(body, data, now)
            case Table():
                self._arrive_table(body, data, now)
            case SwapOut():
                self._arrive_swap_out(body, data, now)
            case SwapIn():
                self._arrive_swap_in(body, data, now)
            case Tombstone():
                self._finish(body, None)
        self._settle(now)

    def extend(self, tick: int, rows: int, now: float) -> None:
        """More rows of a volume are in its ``data``: the first ``rows`` now."""
        waiting = self._volumes.get(tick)
        if waiting is not None and waiting.arrived < rows <= waiting.total:
            waiting.extend(rows, now)
            self._story.add(now, "extend", tick, rows)
        elif waiting is not None or tick not in self._complete:
            self._count("bad_parts", tick, now)

    def take(self, now: float) -> Work | None:
        """What may run now, lowest ticks first; ``None`` if nothing.

        Calling it again before ``complete`` is allowed and gives further work.
        """
        if not self._volumes:
            return None
        decode = self._next(now, prefill=False)
        riding = 0 if decode is None else decode.volume.count
        prefill = self._next(now, prefill=True, riding=riding)
        self._settle(now)
        if decode is None and prefill is None:
            return None
        work = Work(decode, prefill)
        self._story.add(now, "take", *work.ticks)
        return work

    def complete(self, ticks: Sequence[int], now: float) -> list[Control]:
        """What was taken of volumes ``ticks`` has run; returns the controls to be forwarded now.

        Raises:
            InvariantError: nothing was taken of one of them.
        """
        for tick in ticks:
            self._ran(tick, now)
        if ticks:
            self._settle(now)
        if not self._outbox:
            return []
        outbox, self._outbox = self._outbox, []
        return outbox

    @property
    def queued(self) -> int:
        """Volumes that wait for the compute thread or are in it, not for anything else."""
        return self._volumes.queued

    @property
    def only_rests(self) -> bool:
        """Whether all that waits for the compute thread are rests of volumes that have begun."""
        return self._volumes.only_rests

    @property
    def waiting(self) -> int:
        """Volumes that have come, at least in part, and were not taken whole, ready or not."""
        return self._volumes.waiting

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
        if tick in self._complete or tick in self._volumes or tick in self._releases:
            self._count("duplicates", tick, now)
            return False
        if tick > self._complete.watermark + MAX_SPAN:
            self._count("far_ticks", tick, now)
            return False
        return True

    def _arrive_volume(self, volume: Volume, data: object, rows: int | None, now: float) -> None:
        waiting = WaitingVolume.of(volume, data, rows, now)
        requests = {group.request for group in volume.rows}
        if (
            len(requests) < len(volume.rows)
            or any(group.after >= volume.tick for group in volume.rows)
            or not has_honest_drafts(volume)
            or not 1 <= waiting.arrived <= waiting.total
        ):
            self._refuse(volume.tick, "bad_volumes", now)
            return
        room = self._limits.waiting_bytes - self._volumes.nbytes
        if len(self._volumes) >= MAX_WAITING or waiting.nbytes > room:
            self._refuse(volume.tick, "floods", now)
        else:
            self._volumes.add(waiting)
            self._drop_gone(waiting)

    def _arrive_admit(self, admit: Admit, now: float) -> None:
        if not self._known.is_new(admit.request):
            self._refuse(admit.tick, "stale_admits", now)
        elif len(self._known) + len(self._releases) >= self._limits.requests:
            self._refuse(admit.tick, "floods", now)
        else:
            self._known.admit(admit.request)
            self._finish(admit, None)

    def _arrive_grammar(self, grammar: Grammar, data: object, now: float) -> None:
        known = self._known.get(grammar.request)
        if known is None:
            self._refuse(grammar.tick, "stray_grammars", now)
        elif known.add_grammar(grammar):
            self._finish(grammar, data)
        else:
            self._refuse(grammar.tick, "bad_grammars", now)

    def _arrive_history(self, history: History, data: object, now: float) -> None:
        known = self._known.get(history.request)
        if known is None:
            self._refuse(history.tick, "stray_histories", now)
        elif known.add_ids(history, self._limits):
            self._finish(history, data)
        else:
            self._refuse(history.tick, "bad_histories", now)

    def _arrive_table(self, table: Table, data: object, now: float) -> None:
        known = self._known.get(table.request)
        if known is None:
            self._refuse(table.tick, "stray_tables", now)
        elif known.add_blocks(block_ids(table, data), self._limits):
            self._finish(table, data)
        else:
            self._refuse(table.tick, "bad_tables", now)

    def _arrive_swap_out(self, order: SwapOut, data: object, now: float) -> None:
        known, copy = self._known.get(order.request), block_copy(order, data)
        if (
            known is None
            or copy is None
            or known.last not in self._complete
            or len(copy.blocks) > known.blocks
            or not are_distinct(copy.blocks, self._limits.blocks)
            or not self._hosted.fill(order.tick, copy.hosts)
        ):
            self._refuse(order.tick, "bad_swaps", now)
        else:
            self._finish(order, data)

    def _arrive_swap_in(self, order: SwapIn, data: object, now: float) -> None:
        known, copy = self._known.get(order.request), block_copy(order, data)
        if (
            known is not None
            and copy is not None
            and not known.last
            and len(copy.blocks) <= known.blocks
            and are_distinct(copy.blocks, self._limits.blocks)
            and self._hosted.empty(order.filled, copy.hosts)
        ):
            self._finish(order, data)
            return
        if known is not None:
            known.is_broken = True
        self._refuse(order.tick, "bad_swaps", now)

    def _arrive_release(self, release: Release, now: float) -> None:
        named = {release.after, *release.also}
        earlier = {tick for tick in named if tick < release.tick}
        if len(earlier) < len(named):
            self._count("bad_releases", release.tick, now)
        if self._known.get(release.request) is None:
            self._count("stray_releases", release.tick, now)
        if len(self._releases) >= self._limits.requests:
            self._refuse(release.tick, "floods", now)
            return
        self._known.release(release.request)
        earlier |= self._volumes.begun_for(release.request)
        self._releases.add(release, earlier)
        for waiting in self._volumes:
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
        if not self._releases:
            return
        for release in self._releases.ripe():
            self._finish(release, None)
            self._story.add(now, "forget", release.request)

    # --- running -------------------------------------------------------------------------------

    def _next(self, now: float, *, prefill: bool, riding: int = 0) -> Segment | None:
        """The next piece of that kind, beside ``riding`` decode rows."""
        for waiting in self._volumes:
            if waiting.volume.prefill is not prefill:
                continue
            if not waiting.is_begun and self._volumes.is_ready(waiting):
                self._drop_unfit(waiting, now)
            count = self._volumes.piece(waiting, riding)
            if count:
                return self._run(waiting, count)
        return None

    def _run(self, waiting: WaitingVolume, count: int) -> Segment:
        if not waiting.is_begun:
            for rows in waiting.groups:
                self._known.begin(rows, waiting.volume.tick)
        return self._volumes.take(waiting, count)

    def _ran(self, tick: int, now: float) -> None:
        waiting = self._volumes.get(tick)
        if waiting is None or not waiting.running:
            raise InvariantError(f"tick {tick} completed but not taken", self._story.lines())
        self.last_completed += 1
        if self._volumes.ran(waiting):
            self._complete.add(tick)
            self.last_completed = max(tick, self.last_completed)
        self._story.add(now, "complete", tick, waiting.taken)

    # --- dropping ------------------------------------------------------------------------------

    def _drop_gone(self, waiting: WaitingVolume) -> None:
        if not waiting.is_begun:
            rows = waiting.volume.rows
            kept = [index for index in waiting.kept if not self._known.is_over(rows[index].request)]
            self._keep(waiting, kept, "dropped_groups")

    def _drop_unfit(self, waiting: WaitingVolume, now: float) -> None:
        """Drop rows of requests that were never admitted, and those that can't be computed."""
        rows = waiting.volume.rows
        kept = [index for index in waiting.kept if self._known.can_run(rows[index])]
        if len(kept) < len(waiting.kept):
            self._story.add(now, "unfit", waiting.volume.tick)
        self._keep(waiting, kept, "unfit_groups")

    def _keep(self, waiting: WaitingVolume, kept: list[int], what: str) -> None:
        """Drop all but ``kept``; bury the volume if nothing remains."""
        dropped = len(waiting.kept) - len(kept)
        if not dropped:
            return
        self.counts[what] += dropped
        waiting.keep(kept)
        if not kept:
            self._volumes.bury(waiting)
            self.counts["buried_volumes"] += 1
            self._finish(Tombstone(waiting.volume.tick), None)

    def _count(self, what: str, tick: int, now: float) -> None:
        self.counts[what] += 1
        self._story.add(now, what, tick)

    def _problems(self) -> Iterator[str]:
        yield from self._volumes.problems()
        yield from self._releases.problems()
        yield from self._known.problems()
        for waiting in self._volumes:
            tick = waiting.volume.tick
            if tick in self._releases:
                yield f"tick {tick} is in two places"
            gone = any(self._known.is_over(rows.request) for rows in waiting.groups)
            if gone and not waiting.is_begun:
                yield f"volume {tick} keeps rows of requests that are over"
        if len(self._complete) > MAX_SPAN:
            yield "ticks far above the watermark are remembered"
