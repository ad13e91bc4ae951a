"""The seq scoreboard: what a stage may run, drop, forward and forget.

One per stage and epoch, sans-IO. Messages of the two channels arrive in any interleaving, each
channel in its order; seqs say what has to come before what. At one stage a seq is *complete*

- of an ``Admit``, ``Grammar``, ``History``, ``BlockTable``, ``SwapOut`` or ``SwapIn``: when it
  arrives (they share a channel, so in the order of issue; what a swap copies is copied in this
  order, before any step that is taken later);
- of a ``Volume``: when all of its rows have run, or at once when none is left to run;
- of a ``Tombstone``: when it arrives (an earlier stage completed that volume without running it);
- of a ``Release``: when all of ``after`` and ``also`` are complete.

**Running.** A volume may run once the ``after`` seqs of all its remaining rows are complete. They
include, directly or through earlier rows, the seqs that admit the request.

**Pieces.** The rows of a prefill volume may arrive little by little, in order, and run so, a piece
of consecutive rows at a time, as large as :mod:`molink.ring.sub_chunks` says. With its first piece
a volume has *begun*. All of its row groups go on to the next stage in the header of that piece, so
it keeps them until its last row has run; only then its seq is complete, and what comes ``after``
it may run. What is done once for a group (its fitness, its blocks) is done at the beginning.

**Dropping.** From the moment a request's ``Release`` arrives, its rows in volumes that wait or are
still to come are dropped; rows of volumes that have begun run to the end. A volume that loses all
rows is *buried*: it completes, and a ``Tombstone`` goes on in its stead on the control channel;
rows of it that still arrive are ignored. A volume that loses some goes on with the others. Later
stages need not know that rows were dropped, since the seq completes there whichever way it arrives.

**Forgetting.** The head's ``Release`` names every seq with rows of the request that had not come
back; those that had are complete at every stage. Once all of the named ones are complete here, no
row of the request can arrive any more, so the request is forgotten, and only then does the
``Release`` go on. (``after`` alone would not do: the last seq can be buried upstream and overtake,
on the control channel, an earlier volume of the same request on the bulk channel.) When it has gone
round, no stage will touch the request's blocks again. Nothing is kept of forgotten requests: ids
rise with admission, so an id at or below the highest one admitted that is not live is over.

**Sharing.** Rows of one request may read blocks that another one writes, or copy from them, if
their ``after`` covers those writes and the writer is not released before they have come back:
dropped rows write nothing. The head's prefix cache has only what has come back by the time that it
admits the reader, so that ``after`` need not name it.

**Misbehaviour** of other stages is counted, noted in the story, and never wedges this one. A
message that makes no sense becomes a tombstone: its seq completes here and further on, and the
head, which knows what it sent, fails the requests concerned. So for a volume with an ``after`` not
before itself, the same request twice, or drafts that can't be sampled or reported; for rows whose
``after`` is complete but whose request was never admitted or has earlier rows that are not
complete, or whose block table does not hold them or is no honest one, or that copy from no honest
block; for an ``Admit`` of an id that is not new; for
a ``History`` or ``BlockTable`` of a request that is not live, or that is not the next ids of it, no
blocks, or late; for whatever exceeds the ``ScoreboardLimits``, which keep the
memory of this stage bounded. A seq that was seen already, or is absurdly far ahead, is ignored;
so are further rows of a volume that never came, or has had as many. A ``Release`` of a request that
is not live completes like any other, and such a request can't be admitted later; seqs in it that
are not before it are left out. Misuse by our own shell (completing what was not taken) raises
``InvariantError``.

A ``Grammar`` is refused as a ``History`` is, and where it is a second one. A ``SwapOut`` is refused
of a request that is not live or has rows that are not complete, and of blocks, here or in host
memory, that don't exist or are named twice; a ``SwapIn`` also if the host blocks hold anything else
than what the order that it names has brought there. No row of a request runs whose ``SwapIn`` was
refused.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from molink.errors import InvariantError
from molink.ring.step import (
    CompletedControl,
    ControlMessage,
    Step,
    StepInput,
    parse_block_copy,
    parse_block_ids,
)
from molink.ring.sub_chunks import SubChunkPolicy, WholeVolumePolicy
from molink.ring.waiting_volume import WaitingVolume
from molink.util.story import Story
from molink.wire.messages.data_plane import (
    MAX_GRAMMAR_BYTES,
    MAX_SLICES,
    Admit,
    BlockTable,
    Grammar,
    History,
    Release,
    RequestSlice,
    SwapIn,
    SwapOut,
    Tombstone,
    Volume,
)


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


@dataclass(frozen=True, slots=True)
class ScoreboardLimits:
    """What an honest ring never exceeds, or a step would fail, or memory run out.

    ``max_requests`` counts those admitted and not forgotten, ``waiting_bytes`` the rows of volumes
    that have come, at least in part, and were not taken whole. ``max_model_len`` tokens and
    ``max_table_blocks`` blocks are those of one request; ``blocks`` of ``block_size`` tokens are in
    the KV pool, and there are ``host_blocks`` in host memory.
    """

    max_requests: int = 1 << 16
    max_model_len: int = 1 << 24
    max_table_blocks: int = 1 << 24
    blocks: int = 1 << 31
    block_size: int = 1 << 16
    waiting_bytes: int = 256 << 20
    host_blocks: int = 0


def has_honest_drafts(volume: Volume) -> bool:
    """Whether all drafts are of decode rows that are sampled from, and one ``SamplerOutput`` has
    room.

    A group may be drafts only: it goes ahead of the token that it assumes.
    """
    drafted = [group for group in volume.slices if group.drafts]
    if not drafted or volume.prefill:
        return not drafted
    proper = all(group.sample and len(group.drafts) <= group.count for group in drafted)
    checked = sum(len(group.verified_drafts) for group in drafted)
    return proper and len(volume.slices) + checked <= MAX_SLICES


@dataclass(slots=True)
class TrackedRequest:
    """A request that lives: ids of its history, blocks of its table.

    ``last_seq`` is the seq of the latest volume of which rows of it were taken; 0: none was.
    """

    num_ids: int = 0
    num_blocks: int = 0
    last_seq: int = 0
    has_grammar: bool = False
    #: Whether what its blocks should hold could not be brought there: none of its rows can run.
    is_broken: bool = False

    def add_ids(self, history: History, limits: ScoreboardLimits) -> bool:
        """Count the ids of a message; ``False`` if they are not the next ones, or too many."""
        payload = history.payload
        end = history.first + payload.shape[0]
        proper = (
            payload.dtype == "i32" and len(payload.shape) == 1 and history.first == self.num_ids
        )
        if not proper or end > limits.max_model_len:
            return False
        self.num_ids = end
        return True

    def add_grammar(self, grammar: Grammar) -> bool:
        """Note that it has one; ``False`` if it is late, a second one, or no honest one."""
        payload = grammar.payload
        proper = payload.dtype == "u8" and len(payload.shape) == 1
        proper = proper and 0 < payload.nbytes <= MAX_GRAMMAR_BYTES
        if not proper or self.last_seq or self.num_ids or self.has_grammar:
            return False
        self.has_grammar = True
        return True

    def add_blocks(self, blocks: Sequence[int], limits: ScoreboardLimits) -> bool:
        """Count blocks that its table begins with; ``False`` if they are late or no honest ones."""
        end = self.num_blocks + len(blocks)
        proper = len(blocks) and min(blocks) >= 0 and max(blocks) < limits.blocks
        if not proper or self.last_seq or end > limits.max_table_blocks:
            return False
        self.num_blocks = end
        return True

    def can_run(self, request_slice: RequestSlice, limits: ScoreboardLimits) -> bool:
        """Whether its table, with what the rows bring along, holds them all."""
        if (
            any(block >= limits.blocks for block in request_slice.blocks)
            or request_slice.copy_from_block >= limits.blocks
        ):
            return False
        if self.is_broken or (
            request_slice.copy_from_block >= 0 and request_slice.start % limits.block_size == 0
        ):
            return False
        table, end = (
            self.num_blocks + len(request_slice.blocks),
            request_slice.start + request_slice.count,
        )
        return table <= limits.max_table_blocks and end <= min(
            limits.max_model_len, table * limits.block_size
        )

    def start_rows(self, request_slice: RequestSlice, seq: int) -> None:
        """The first piece of a volume with these rows was taken."""
        self.num_blocks += len(request_slice.blocks)
        self.last_seq = seq


class TrackedRequests:
    """Those that were admitted and are not known to be over.

    Nothing is kept of the others: ids rise with admission, so who is not among them and no newer
    than the newest is over.
    """

    def __init__(self, limits: ScoreboardLimits, complete: SeqSet) -> None:
        """``complete`` are the stage's seqs, which somebody else adds to."""
        self._limits = limits
        self._complete = complete
        self._live: dict[int, TrackedRequest] = {}
        self._highest_id = -1

    def __len__(self) -> int:
        return len(self._live)

    def get_request(self, request: int) -> TrackedRequest | None:
        """One that lives."""
        return self._live.get(request)

    def is_new(self, request: int) -> bool:
        """Whether it can still be admitted."""
        return request > self._highest_id

    def is_finished(self, request: int) -> bool:
        """Whether it was released, or can't be admitted any more."""
        return request <= self._highest_id and request not in self._live

    def admit_request(self, request: int) -> None:
        """A new one begins."""
        self._highest_id = request
        self._live[request] = TrackedRequest()

    def release_request(self, request: int) -> None:
        """It is over.

        Admitted after its release, it would be forgotten in the midst of its rows: it is not new
        any more.
        """
        self._highest_id = max(self._highest_id, request)
        self._live.pop(request, None)

    def can_run(self, request_slice: RequestSlice) -> bool:
        """Whether these rows are to be computed, all seqs being complete that they come after."""
        known = self._live.get(request_slice.request)
        if known is None or known.last_seq not in self._complete:
            return False
        return known.can_run(request_slice, self._limits)

    def start_rows(self, request_slice: RequestSlice, seq: int) -> None:
        """The first piece of a volume with these rows was taken."""
        self._live[request_slice.request].start_rows(request_slice, seq)

    def find_problems(self) -> Iterator[str]:
        """What must not be."""
        if any(request > self._highest_id for request in self._live):
            yield "a request is live that was never admitted"


class HostBlockLedger:
    """Which order to swap out has filled each of ``blocks`` host blocks at one stage."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        #: By host block, its seq.
        self._filled: dict[int, int] = {}

    def fill_blocks(self, seq: int, hosts: Sequence[int]) -> bool:
        """Order ``seq`` copies there; ``False`` if there are no such blocks."""
        if not are_distinct(hosts, self._blocks):
            return False
        self._filled.update(dict.fromkeys(hosts, seq))
        return True

    def drain_blocks(self, swap_out_seq: int, hosts: Sequence[int]) -> bool:
        """What order ``filled`` has copied there comes back; ``False`` if it isn't there."""
        if not are_distinct(hosts, self._blocks):
            return False
        if any(self._filled.get(host) != swap_out_seq for host in hosts):
            return False
        for host in hosts:
            del self._filled[host]
        return True


def are_distinct(blocks: Sequence[int], total: int) -> bool:
    """Whether they are some of ``total`` blocks, none of them named twice."""
    within = len(blocks) > 0 and min(blocks) >= 0 and max(blocks) < total
    return within and len(set(blocks)) == len(blocks)


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


#: A seq further than this above the watermark is no honest message; the head keeps to half of it.
MAX_SEQ_SPAN = 1 << 16
#: What is counted and no misbehaviour: of cancelled requests, and resent messages.
_HARMLESS = ("dropped_slices", "buried_volumes", "duplicates")
#: Volumes that may wait; the head has at most 128 in flight.
MAX_WAITING_VOLUMES = 1024


class Scoreboard:
    """Orders one stage's work during one epoch; see the module for the rules."""

    def __init__(
        self, limits: ScoreboardLimits | None = None, sub_chunk_policy: SubChunkPolicy | None = None
    ) -> None:
        """``sub_chunk_policy`` decides on pieces of prefill volumes; without it volumes run
        whole."""
        self._limits = limits or ScoreboardLimits()
        self.counters: Counter[str] = Counter()
        #: Progress of the compute thread: rises with every piece that has run. After the last piece
        #: of a volume it is its seq at least.
        self.last_completed_seq = 0
        self._complete = SeqSet()
        self._requests = TrackedRequests(self._limits, self._complete)
        self._host_blocks = HostBlockLedger(self._limits.host_blocks)
        self._volumes = VolumeQueue(self._complete, sub_chunk_policy or WholeVolumePolicy())
        self._releases = PendingReleases(self._complete)
        self._completed: list[CompletedControl] = []
        self._story = Story()

    def on_message(
        self, body: ControlMessage | Volume, data: object, now: float, rows: int | None = None
    ) -> None:
        """A message is here; ``data`` is kept with it and handed out again.

        ``rows`` is how many rows of a volume have arrived, ``None`` if all; ``data`` has room for
        all of them. Call ``complete((), now)`` afterwards: controls may have been completed by it.
        """
        if not self._is_new(body.seq, now):
            return
        self._story.add_entry(now, "arrive", type(body).__name__, body.seq)
        match body:
            case Volume():
                self._on_volume(body, data, rows, now)
            case Release():
                self._on_release(body, now)
            case Admit():
                self._on_admit(body, now)
            case Grammar():
                self._on_grammar(body, data, now)
            case History():
                self._on_history(body, data, now)
            case BlockTable():
                self._on_block_table(body, data, now)
            case SwapOut():
                self._on_swap_out(body, data, now)
            case SwapIn():
                self._on_swap_in(body, data, now)
            case Tombstone():
                self._complete_control(body, None)
        self._complete_releases(now)

    def extend_volume(self, seq: int, rows: int, now: float) -> None:
        """More rows of a volume are in its ``data``: the first ``rows`` now."""
        waiting = self._volumes.get_volume(seq)
        if waiting is not None and waiting.num_arrived < rows <= waiting.num_rows:
            waiting.extend_rows(rows, now)
            self._story.add_entry(now, "extend", seq, rows)
        elif waiting is not None or seq not in self._complete:
            self._count_event("bad_parts", seq, now)

    def next_step(self, now: float) -> Step | None:
        """What may run now, lowest seqs first; ``None`` if nothing.

        Calling it again before ``complete_volumes`` is allowed and gives further work.
        """
        if not self._volumes:
            return None
        decode = self._next_input(now, prefill=False)
        piggybacked = 0 if decode is None else decode.volume.count
        prefill = self._next_input(now, prefill=True, piggybacked=piggybacked)
        self._complete_releases(now)
        if decode is None and prefill is None:
            return None
        work = Step(decode, prefill)
        self._story.add_entry(now, "take", *work.seqs)
        return work

    def complete_volumes(self, seqs: Sequence[int], now: float) -> list[CompletedControl]:
        """What was taken of volumes ``seqs`` has run; returns the controls to be forwarded now.

        Raises:
            InvariantError: nothing was taken of one of them.
        """
        for seq in seqs:
            self._complete_sub_chunk(seq, now)
        if seqs:
            self._complete_releases(now)
        if not self._completed:
            return []
        outbox, self._completed = self._completed, []
        return outbox

    @property
    def num_queued(self) -> int:
        """Volumes that wait for the compute thread or are in it, not for anything else."""
        return self._volumes.num_queued

    @property
    def has_only_remainders(self) -> bool:
        """Whether all that waits for the compute thread are rests of volumes that have begun."""
        return self._volumes.has_only_remainders

    @property
    def num_waiting(self) -> int:
        """Volumes that have come, at least in part, and were not taken whole, ready or not."""
        return self._volumes.num_waiting

    @property
    def num_refused(self) -> int:
        """Messages of other stages that made no sense, or were too many."""
        return self.counters.total() - sum(self.counters[what] for what in _HARMLESS)

    def validate(self) -> None:
        """Check all invariants.

        Raises:
            InvariantError: one is broken; carries the last transitions.
        """
        for problem in self._find_problems():
            raise InvariantError(problem, self._story.format_lines())

    # --- arrivals ------------------------------------------------------------------------------

    def _is_new(self, seq: int, now: float) -> bool:
        if seq in self._complete or seq in self._volumes or seq in self._releases:
            self._count_event("duplicates", seq, now)
            return False
        if seq > self._complete.watermark + MAX_SEQ_SPAN:
            self._count_event("far_seqs", seq, now)
            return False
        return True

    def _on_volume(self, volume: Volume, data: object, rows: int | None, now: float) -> None:
        waiting = WaitingVolume.of_volume(volume, data, rows, now)
        requests = {group.request for group in volume.slices}
        if (
            len(requests) < len(volume.slices)
            or any(group.after_seq >= volume.seq for group in volume.slices)
            or not has_honest_drafts(volume)
            or not 1 <= waiting.num_arrived <= waiting.num_rows
        ):
            self._refuse(volume.seq, "bad_volumes", now)
            return
        room = self._limits.waiting_bytes - self._volumes.nbytes
        if len(self._volumes) >= MAX_WAITING_VOLUMES or waiting.nbytes > room:
            self._refuse(volume.seq, "floods", now)
        else:
            self._volumes.add_volume(waiting)
            self._drop_released(waiting)

    def _on_admit(self, admit: Admit, now: float) -> None:
        if not self._requests.is_new(admit.request):
            self._refuse(admit.seq, "stale_admits", now)
        elif len(self._requests) + len(self._releases) >= self._limits.max_requests:
            self._refuse(admit.seq, "floods", now)
        else:
            self._requests.admit_request(admit.request)
            self._complete_control(admit, None)

    def _on_grammar(self, grammar: Grammar, data: object, now: float) -> None:
        known = self._requests.get_request(grammar.request)
        if known is None:
            self._refuse(grammar.seq, "stray_grammars", now)
        elif known.add_grammar(grammar):
            self._complete_control(grammar, data)
        else:
            self._refuse(grammar.seq, "bad_grammars", now)

    def _on_history(self, history: History, data: object, now: float) -> None:
        known = self._requests.get_request(history.request)
        if known is None:
            self._refuse(history.seq, "stray_histories", now)
        elif known.add_ids(history, self._limits):
            self._complete_control(history, data)
        else:
            self._refuse(history.seq, "bad_histories", now)

    def _on_block_table(self, table: BlockTable, data: object, now: float) -> None:
        known = self._requests.get_request(table.request)
        if known is None:
            self._refuse(table.seq, "stray_tables", now)
        elif known.add_blocks(parse_block_ids(table, data), self._limits):
            self._complete_control(table, data)
        else:
            self._refuse(table.seq, "bad_tables", now)

    def _on_swap_out(self, swap: SwapOut, data: object, now: float) -> None:
        known, copy = self._requests.get_request(swap.request), parse_block_copy(swap, data)
        if (
            known is None
            or copy is None
            or known.last_seq not in self._complete
            or len(copy.blocks) > known.num_blocks
            or not are_distinct(copy.blocks, self._limits.blocks)
            or not self._host_blocks.fill_blocks(swap.seq, copy.host_blocks)
        ):
            self._refuse(swap.seq, "bad_swaps", now)
        else:
            self._complete_control(swap, data)

    def _on_swap_in(self, swap: SwapIn, data: object, now: float) -> None:
        known, copy = self._requests.get_request(swap.request), parse_block_copy(swap, data)
        if (
            known is not None
            and copy is not None
            and not known.last_seq
            and len(copy.blocks) <= known.num_blocks
            and are_distinct(copy.blocks, self._limits.blocks)
            and self._host_blocks.drain_blocks(swap.swap_out_seq, copy.host_blocks)
        ):
            self._complete_control(swap, data)
            return
        if known is not None:
            known.is_broken = True
        self._refuse(swap.seq, "bad_swaps", now)

    def _on_release(self, release: Release, now: float) -> None:
        named = {release.after_seq, *release.pending_seqs}
        earlier = {seq for seq in named if seq < release.seq}
        if len(earlier) < len(named):
            self._count_event("bad_releases", release.seq, now)
        if self._requests.get_request(release.request) is None:
            self._count_event("stray_releases", release.seq, now)
        if len(self._releases) >= self._limits.max_requests:
            self._refuse(release.seq, "floods", now)
            return
        self._requests.release_request(release.request)
        earlier |= self._volumes.started_seqs(release.request)
        self._releases.add_release(release, earlier)
        for waiting in self._volumes:
            self._drop_released(waiting)

    # --- completion ----------------------------------------------------------------------------

    def _complete_control(self, body: ControlMessage, data: object) -> None:
        """A control is complete and goes on."""
        self._complete.add_seq(body.seq)
        self._completed.append(CompletedControl(body, data))

    def _refuse(self, seq: int, what: str, now: float) -> None:
        """A message that makes no sense completes without effect, here and further on."""
        self._count_event(what, seq, now)
        self._complete_control(Tombstone(seq), None)

    def _complete_releases(self, now: float) -> None:
        """Complete the releases that wait for nothing any more."""
        if not self._releases:
            return
        for release in self._releases.pop_complete():
            self._complete_control(release, None)
            self._story.add_entry(now, "forget", release.request)

    # --- running -------------------------------------------------------------------------------

    def _next_input(self, now: float, *, prefill: bool, piggybacked: int = 0) -> StepInput | None:
        """The next piece of that kind, beside ``riding`` decode rows."""
        for waiting in self._volumes:
            if waiting.volume.prefill is not prefill:
                continue
            if not waiting.is_started and self._volumes.is_ready(waiting):
                self._drop_invalid(waiting, now)
            count = self._volumes.next_rows(waiting, piggybacked)
            if count:
                return self._take_rows(waiting, count)
        return None

    def _take_rows(self, waiting: WaitingVolume, count: int) -> StepInput:
        if not waiting.is_started:
            for rows in waiting.slices:
                self._requests.start_rows(rows, waiting.volume.seq)
        return self._volumes.take_rows(waiting, count)

    def _complete_sub_chunk(self, seq: int, now: float) -> None:
        waiting = self._volumes.get_volume(seq)
        if waiting is None or not waiting.is_running:
            raise InvariantError(f"seq {seq} completed but not taken", self._story.format_lines())
        self.last_completed_seq += 1
        if self._volumes.complete_sub_chunk(waiting):
            self._complete.add_seq(seq)
            self.last_completed_seq = max(seq, self.last_completed_seq)
        self._story.add_entry(now, "complete", seq, waiting.num_taken)

    # --- dropping ------------------------------------------------------------------------------

    def _drop_released(self, waiting: WaitingVolume) -> None:
        if not waiting.is_started:
            rows = waiting.volume.slices
            kept_indices = [
                index
                for index in waiting.slice_indices
                if not self._requests.is_finished(rows[index].request)
            ]
            self._keep_slices(waiting, kept_indices, "dropped_slices")

    def _drop_invalid(self, waiting: WaitingVolume, now: float) -> None:
        """Drop rows of requests that were never admitted, and those that can't be computed."""
        rows = waiting.volume.slices
        kept_indices = [
            index for index in waiting.slice_indices if self._requests.can_run(rows[index])
        ]
        if len(kept_indices) < len(waiting.slice_indices):
            self._story.add_entry(now, "unfit", waiting.volume.seq)
        self._keep_slices(waiting, kept_indices, "invalid_slices")

    def _keep_slices(self, waiting: WaitingVolume, kept_indices: list[int], what: str) -> None:
        """Drop all but ``kept``; bury the volume if nothing remains."""
        dropped = len(waiting.slice_indices) - len(kept_indices)
        if not dropped:
            return
        self.counters[what] += dropped
        waiting.keep_slices(kept_indices)
        if not kept_indices:
            self._volumes.drop_volume(waiting)
            self.counters["buried_volumes"] += 1
            self._complete_control(Tombstone(waiting.volume.seq), None)

    def _count_event(self, what: str, seq: int, now: float) -> None:
        self.counters[what] += 1
        self._story.add_entry(now, what, seq)

    def _find_problems(self) -> Iterator[str]:
        yield from self._volumes.find_problems()
        yield from self._releases.find_problems()
        yield from self._requests.find_problems()
        for waiting in self._volumes:
            seq = waiting.volume.seq
            if seq in self._releases:
                yield f"seq {seq} is in two places"
            gone = any(self._requests.is_finished(rows.request) for rows in waiting.slices)
            if gone and not waiting.is_started:
                yield f"volume {seq} keeps rows of requests that are over"
        if len(self._complete) > MAX_SEQ_SPAN:
            yield "seqs far above the watermark are remembered"
