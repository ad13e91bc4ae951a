"""The scoreboard decides what a stage runs, drops, forwards and releases.

One instance per stage and epoch, without I/O. The messages of the two channels arrive in any
interleaving; each channel keeps its order. Sequence numbers (``seq``) say which messages come
before which. At one stage a ``seq`` is *complete*

- of an ``Admit``, ``Grammar``, ``History``, ``PromptImages``, ``BlockTable``, ``SwapOut`` or
  ``SwapIn``: on arrival. They share a channel and arrive in order of issue. Swaps are copied in
  this order, before any step that is taken later.
- of a ``Volume``: when all its rows have run, or as soon as none are left to run.
- of a ``Tombstone``: on arrival. An earlier stage completed that volume without running it.
- of a ``Release``: when ``after_seq`` and all ``pending_seqs`` are complete.

**Running.** A volume may run once the ``after_seq`` of each of its remaining slices is complete.
Directly or through earlier rows, these cover the messages that admit the request.

**Sub-chunks.** The rows of a prefill volume may arrive and run in several consecutive sub-chunks
(:mod:`molink.ring.sub_chunks`). A volume is *started* once its first sub-chunk is taken. The header
of that sub-chunk forwards all slices of the volume, so a started volume keeps them until its last
row has run. Only then is its ``seq`` complete. Validity and new blocks of a slice are handled with
its first sub-chunk.

**Dropping.** A ``Release`` drops the request's rows from volumes that have not started, including
those that arrive later. Started volumes run to the end. A volume that loses all rows is dropped: it
completes and is replaced by a ``Tombstone`` on the decode channel, and further rows of it are
ignored. A volume that loses some rows runs with the rest. Later stages need not know which rows
were dropped; the ``seq`` completes there either way.

**Releasing.** The scheduler's ``Release`` lists every ``seq`` with rows of the request that had not
come back; earlier ones are complete at every stage. Once all of them are complete here, no row of
the request can arrive, so the stage releases the request and forwards the ``Release``.
(``after_seq`` alone would not suffice: the last volume can be dropped upstream and overtake an
earlier volume of the same request, since the two travel on different channels.) When the
``Release`` has gone round the ring, no stage uses the request's blocks. Released requests leave no
state behind: request ids rise with admission, so an id at or below the highest one that is not live
is finished.

**Sharing.** Rows may read or copy blocks that another request writes if their ``after_seq`` covers
those writes and the writer is not released before they have come back, since dropped rows write
nothing. The prefix cache only holds blocks that had come back when it admits the reader, so
``after_seq`` need not cover those writes.

**Misbehaviour** of other stages is counted and logged and never blocks this stage. An invalid
message becomes a tombstone: its ``seq`` completes here and downstream, and the scheduler, which
knows what it sent, fails the affected requests. These are invalid:

- volumes with an ``after_seq`` not below their own ``seq``, with a request twice, or with drafts
  that can't be sampled or reported;
- rows of a request that was never admitted or has incomplete earlier rows, rows that its block
  table doesn't hold, and copies from blocks that don't exist;
- an ``Admit`` of an old id;
- a ``History``, ``Grammar``, ``PromptImages`` or ``BlockTable`` of a request that isn't live, out
  of order, repeated or late;
- a ``SwapOut`` of a request that isn't live or has incomplete rows, or of blocks that don't exist
  or repeat; a ``SwapIn`` also if its host blocks hold anything but that ``SwapOut``'s data. No row
  runs of a request with a rejected ``SwapIn``;
- anything beyond ``ScoreboardLimits``, which bound this stage's memory.

A duplicate or far too high ``seq`` is ignored, as are surplus rows of a volume. A ``Release`` of a
request that isn't live completes like any other and prevents its later admission. Misuse by the
local shell (completing what was not taken) raises ``InvariantError``.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.errors import InvariantError
from molink.facts.images import ImageSpan
from molink.ring.step import (
    CompletedControl,
    ControlMessage,
    Step,
    StepInput,
    parse_block_copy,
    parse_block_ids,
)
from molink.ring.sub_chunks import SubChunkPolicy, WholeVolumePolicy
from molink.ring.volume_queue import SeqSet, VolumeQueue, WaitingVolume
from molink.util.transition_log import TransitionLog
from molink.wire.messages.data_plane import (
    MAX_GRAMMAR_BYTES,
    MAX_SLICES,
    Admit,
    BlockTable,
    Grammar,
    History,
    PromptImages,
    Release,
    RequestSlice,
    SwapIn,
    SwapOut,
    Tombstone,
    Volume,
)


class StepRule:
    """Decides which rows may run together; the base class allows all."""

    def allows(self, decode: StepInput | None, volume: Volume, count: int) -> bool:
        """Whether ``count`` rows of ``volume`` may run now, in the pass of ``decode`` if given."""
        return True


FUSE_ALL = StepRule()


class PendingReleases:
    """Releases that a stage can't complete yet, each with the numbers for which it waits."""

    def __init__(self, complete: SeqSet) -> None:
        """``complete`` is the stage's set of complete numbers; the scoreboard adds to it."""
        self._complete = complete
        self._waiting: dict[int, tuple[Release, set[int]]] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add_release(self, release: Release, seqs: set[int]) -> None:
        """Add a release that is complete once all of ``seqs`` are."""
        self._waiting[release.seq] = release, self._complete.find_missing(seqs)

    def pop_complete(self) -> Iterator[Release]:
        """Remove and yield the releases that are complete.

        The caller completes each one before it asks for the next, which may wait for it.
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
        """List broken invariants."""
        for seq, (_, missing) in self._waiting.items():
            if seq in self._complete:
                yield f"release {seq} is complete but still pending"
            if not self._complete.find_missing(missing):
                yield f"release {seq} waits for nothing"


@dataclass(frozen=True, slots=True)
class ScoreboardLimits:
    """Limits that a well-behaved ring never exceeds.

    Beyond them a step would fail or memory run out.

    ``max_requests`` counts requests that are admitted and not released. ``waiting_bytes`` counts
    rows of volumes that have arrived, at least in part, and are not fully taken. ``max_model_len``
    (tokens) and ``max_table_blocks`` are per request. The KV pool has ``blocks`` of ``block_size``
    tokens, host memory ``host_blocks``.
    """

    max_requests: int = 1 << 16
    max_model_len: int = 1 << 24
    max_table_blocks: int = 1 << 24
    blocks: int = 1 << 31
    block_size: int = 1 << 16
    waiting_bytes: int = 256 << 20
    host_blocks: int = 0


def has_valid_drafts(volume: Volume) -> bool:
    """Whether all drafts belong to sampled decode rows and fit one ``SamplerOutput``.

    A slice may consist of drafts only (lookahead).
    """
    drafted = [request_slice for request_slice in volume.slices if request_slice.drafts]
    if not drafted or volume.prefill:
        return not drafted
    proper = all(
        request_slice.sample and len(request_slice.drafts) <= request_slice.count
        for request_slice in drafted
    )
    checked = sum(len(request_slice.verified_drafts) for request_slice in drafted)
    return proper and len(volume.slices) + checked <= MAX_SLICES


@dataclass(slots=True)
class TrackedRequest:
    """A live request.

    ``last_seq`` is the ``seq`` of the latest volume with taken rows of the request; 0 if there is
    none.
    """

    num_ids: int = 0
    num_blocks: int = 0
    last_seq: int = 0
    has_grammar: bool = False
    has_images: bool = False
    #: Images whose rows must run in one step.
    whole_images: tuple[ImageSpan, ...] = ()
    #: Whether a rejected message left its blocks without data, so that none of its rows can run.
    is_broken: bool = False

    def add_ids(self, history: History, limits: ScoreboardLimits) -> bool:
        """Count token ids of a message; ``False`` if they are out of order or too many."""
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
        """Record a grammar; ``False`` if it is late, repeated or invalid."""
        payload = grammar.payload
        proper = payload.dtype == "u8" and len(payload.shape) == 1
        proper = proper and 0 < payload.nbytes <= MAX_GRAMMAR_BYTES
        if not proper or self.last_seq or self.num_ids or self.has_grammar:
            return False
        self.has_grammar = True
        return True

    def add_images(self, images: PromptImages, limits: ScoreboardLimits) -> bool:
        """Record images; ``False`` if they are late, repeated, out of order or too far."""
        ends = [0, *(span.end for span in images.spans)]
        proper = all(end <= span.start for end, span in zip(ends, images.spans, strict=False))
        if not proper or ends[-1] > limits.max_model_len or self.last_seq or self.has_images:
            return False
        self.has_images = True
        self.whole_images = images.spans if images.whole else ()
        return True

    def add_blocks(self, blocks: Sequence[int], limits: ScoreboardLimits) -> bool:
        """Count the first blocks of the request's table; ``False`` if they are late or invalid."""
        end = self.num_blocks + len(blocks)
        proper = len(blocks) and min(blocks) >= 0 and max(blocks) < limits.blocks
        if not proper or self.last_seq or end > limits.max_table_blocks:
            return False
        self.num_blocks = end
        return True

    def can_run(self, request_slice: RequestSlice, limits: ScoreboardLimits) -> bool:
        """Whether the request's table, with the slice's new blocks, holds all rows of the slice."""
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
        """Record that the first sub-chunk of a volume with these rows is taken."""
        self.num_blocks += len(request_slice.blocks)
        self.last_seq = seq


class TrackedRequests:
    """All live requests: those admitted and not released. Nothing is kept of other requests.

    Request ids rise with admission, so an id at or below the highest one that isn't live is
    finished.
    """

    def __init__(self, limits: ScoreboardLimits, complete: SeqSet) -> None:
        """``complete`` is the stage's set of complete numbers; the scoreboard adds to it."""
        self._limits = limits
        self._complete = complete
        self._live: dict[int, TrackedRequest] = {}
        self._highest_id = -1

    def __len__(self) -> int:
        return len(self._live)

    def get_request(self, request: int) -> TrackedRequest | None:
        """Return the live request of this id."""
        return self._live.get(request)

    def find_whole_images(self, request: int) -> Sequence[ImageSpan]:
        """Return the request's images whose rows must run in one step."""
        known = self._live.get(request)
        return () if known is None else known.whole_images

    def is_new(self, request: int) -> bool:
        """Whether the request can still be admitted."""
        return request > self._highest_id

    def is_finished(self, request: int) -> bool:
        """Whether the request was released or can no longer be admitted."""
        return request <= self._highest_id and request not in self._live

    def admit_request(self, request: int) -> None:
        """Start tracking a new request."""
        self._highest_id = request
        self._live[request] = TrackedRequest()

    def release_request(self, request: int) -> None:
        """Stop tracking a request.

        It can't be admitted afterwards; otherwise it would be released too early.
        """
        self._highest_id = max(self._highest_id, request)
        self._live.pop(request, None)

    def can_run(self, request_slice: RequestSlice) -> bool:
        """Whether these rows can be computed once every ``seq`` that they depend on is complete."""
        known = self._live.get(request_slice.request)
        if known is None or known.last_seq not in self._complete:
            return False
        return known.can_run(request_slice, self._limits)

    def start_rows(self, request_slice: RequestSlice, seq: int) -> None:
        """As :meth:`TrackedRequest.start_rows`."""
        self._live[request_slice.request].start_rows(request_slice, seq)

    def find_problems(self) -> Iterator[str]:
        """List broken invariants."""
        if any(request > self._highest_id for request in self._live):
            yield "a request is live that was never admitted"


class HostBlockLedger:
    """Remembers which ``SwapOut`` has filled each of ``blocks`` host blocks of a stage."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        #: Host block to the ``seq`` of its ``SwapOut``.
        self._filled: dict[int, int] = {}

    def fill_blocks(self, seq: int, hosts: Sequence[int]) -> bool:
        """Record that ``SwapOut`` ``seq`` fills these blocks; ``False`` if they don't exist."""
        if not are_distinct(hosts, self._blocks):
            return False
        self._filled.update(dict.fromkeys(hosts, seq))
        return True

    def drain_blocks(self, swap_out_seq: int, hosts: Sequence[int]) -> bool:
        """Record that the data of a ``SwapOut`` is copied back; ``False`` if it isn't there."""
        if not are_distinct(hosts, self._blocks):
            return False
        if any(self._filled.get(host) != swap_out_seq for host in hosts):
            return False
        for host in hosts:
            del self._filled[host]
        return True


def are_distinct(blocks: Sequence[int], total: int) -> bool:
    """Whether these are distinct ids of ``total`` blocks."""
    within = len(blocks) > 0 and min(blocks) >= 0 and max(blocks) < total
    return within and len(set(blocks)) == len(blocks)


#: Maximum distance of a valid ``seq`` above the watermark; the scheduler uses at most half of it.
MAX_SEQ_SPAN = 1 << 16
#: Counters of effects of cancelled requests and resent messages, which are not misbehaviour.
_HARMLESS = ("dropped_slices", "dropped_volumes", "duplicates")
#: Maximum waiting volumes; the scheduler has at most 128 in flight.
MAX_WAITING_VOLUMES = 1024


class Scoreboard:
    """Orders one stage's work during one epoch; the module docstring has the rules."""

    def __init__(
        self, limits: ScoreboardLimits | None = None, sub_chunk_policy: SubChunkPolicy | None = None
    ) -> None:
        """Without ``sub_chunk_policy`` prefill volumes run whole."""
        self._limits = limits or ScoreboardLimits()
        self.counters: Counter[str] = Counter()
        #: Progress of the compute thread. It rises with every sub-chunk that has run, and is at
        #: least the ``seq`` of each completed volume.
        self.last_completed_seq = 0
        self._complete = SeqSet()
        self._requests = TrackedRequests(self._limits, self._complete)
        self._host_blocks = HostBlockLedger(self._limits.host_blocks)
        policy = sub_chunk_policy or WholeVolumePolicy()
        self._volumes = VolumeQueue(self._complete, policy, self._requests.find_whole_images)
        self._releases = PendingReleases(self._complete)
        self._completed: list[CompletedControl] = []
        self._transitions = TransitionLog()

    def on_message(
        self, body: ControlMessage | Volume, data: object, now: float, rows: int | None = None
    ) -> None:
        """Handle a message; ``data`` is kept with it and returned later.

        ``rows`` of a volume have arrived (``None``: all); ``data`` has room for all. Call
        ``complete_volumes((), now)`` afterwards, since controls may now be complete.
        """
        if not self._is_new(body.seq, now):
            return
        self._transitions.add_entry(now, "arrive", type(body).__name__, body.seq)
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
            case PromptImages():
                self._on_images(body, data, now)
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
        """Record that the first ``rows`` rows of a volume are in its ``data``."""
        waiting = self._volumes.get_volume(seq)
        if waiting is not None and waiting.num_arrived < rows <= waiting.num_rows:
            waiting.extend_rows(rows, now)
            self._transitions.add_entry(now, "extend", seq, rows)
        elif waiting is not None or seq not in self._complete:
            self._count_event("bad_parts", seq, now)

    def next_step(self, now: float, rule: StepRule = FUSE_ALL) -> Step | None:
        """Take the step that can run now and that ``rule`` allows; ``None`` if there is none.

        The lowest ``seq`` is first. A second call before ``complete_volumes`` takes further work.
        """
        if not self._volumes:
            return None
        decode = self._next_input(now, rule, None, prefill=False)
        chunk = self._next_input(now, rule, decode, prefill=True)
        self._complete_releases(now)
        if decode is None and chunk is None:
            return None
        work = Step(decode, chunk)
        self._transitions.add_entry(now, "take", *work.seqs)
        return work

    def complete_volumes(self, seqs: Sequence[int], now: float) -> list[CompletedControl]:
        """Record that the taken rows of volumes ``seqs`` have run; return the controls to forward.

        Raises:
            InvariantError: no rows of one of them were taken.
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
        """Number of volumes that wait for or occupy the compute thread."""
        return self._volumes.num_queued

    @property
    def has_only_remainders(self) -> bool:
        """As :attr:`VolumeQueue.has_only_remainders`."""
        return self._volumes.has_only_remainders

    @property
    def num_waiting(self) -> int:
        """As :attr:`VolumeQueue.num_waiting`."""
        return self._volumes.num_waiting

    @property
    def num_refused(self) -> int:
        """Number of invalid or excess messages from other stages."""
        return self.counters.total() - sum(self.counters[what] for what in _HARMLESS)

    def validate(self) -> None:
        """Check all invariants.

        Raises:
            InvariantError: one is broken; carries the last transitions.
        """
        for problem in self._find_problems():
            raise InvariantError(problem, self._transitions.format_lines())

    # --- arrivals --------------------------------------------------------------------------------

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
        requests = {request_slice.request for request_slice in volume.slices}
        if (
            len(requests) < len(volume.slices)
            or any(request_slice.after_seq >= volume.seq for request_slice in volume.slices)
            or not has_valid_drafts(volume)
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

    def _on_images(self, images: PromptImages, data: object, now: float) -> None:
        known = self._requests.get_request(images.request)
        if known is None:
            self._refuse(images.seq, "stray_images", now)
        elif known.add_images(images, self._limits):
            self._complete_control(images, data)
        else:
            self._refuse(images.seq, "bad_images", now)

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

    # --- completion ------------------------------------------------------------------------------

    def _complete_control(self, body: ControlMessage, data: object) -> None:
        self._complete.add_seq(body.seq)
        self._completed.append(CompletedControl(body, data))

    def _refuse(self, seq: int, what: str, now: float) -> None:
        """Replace an invalid message by a tombstone.

        It then completes without effect, here and downstream.
        """
        self._count_event(what, seq, now)
        self._complete_control(Tombstone(seq), None)

    def _complete_releases(self, now: float) -> None:
        if not self._releases:
            return
        for release in self._releases.pop_complete():
            self._complete_control(release, None)
            self._transitions.add_entry(now, "release", release.request)

    # --- running ---------------------------------------------------------------------------------

    def _next_input(
        self, now: float, rule: StepRule, decode: StepInput | None, *, prefill: bool
    ) -> StepInput | None:
        """Take the next sub-chunk of a kind, together with ``decode`` rows."""
        piggybacked = 0 if decode is None else decode.volume.count
        for waiting in self._volumes:
            if waiting.volume.prefill is not prefill:
                continue
            if not waiting.is_started and self._volumes.is_ready(waiting):
                self._drop_invalid(waiting, now)
            count = self._volumes.next_rows(waiting, piggybacked)
            if count and rule.allows(decode, waiting.volume, count):
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
            raise InvariantError(
                f"seq {seq} completed but not taken", self._transitions.format_lines()
            )
        self.last_completed_seq += 1
        if self._volumes.complete_sub_chunk(waiting):
            self._complete.add_seq(seq)
            self.last_completed_seq = max(seq, self.last_completed_seq)
        self._transitions.add_entry(now, "complete", seq, waiting.num_taken)

    # --- dropping --------------------------------------------------------------------------------

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
        """Drop rows of requests that were never admitted, and rows that can't be computed."""
        rows = waiting.volume.slices
        kept_indices = [
            index for index in waiting.slice_indices if self._requests.can_run(rows[index])
        ]
        if len(kept_indices) < len(waiting.slice_indices):
            self._transitions.add_entry(now, "invalid", waiting.volume.seq)
        self._keep_slices(waiting, kept_indices, "invalid_slices")

    def _keep_slices(self, waiting: WaitingVolume, kept_indices: list[int], what: str) -> None:
        """Drop all other slices, and the volume if none remains."""
        dropped = len(waiting.slice_indices) - len(kept_indices)
        if not dropped:
            return
        self.counters[what] += dropped
        waiting.keep_slices(kept_indices)
        if not kept_indices:
            self._volumes.drop_volume(waiting)
            self.counters["dropped_volumes"] += 1
            self._complete_control(Tombstone(waiting.volume.seq), None)

    def _count_event(self, what: str, seq: int, now: float) -> None:
        self.counters[what] += 1
        self._transitions.add_entry(now, what, seq)

    def _find_problems(self) -> Iterator[str]:
        yield from self._volumes.find_problems()
        yield from self._releases.find_problems()
        yield from self._requests.find_problems()
        for waiting in self._volumes:
            seq = waiting.volume.seq
            if seq in self._releases:
                yield f"seq {seq} is both a volume and a release"
            finished = any(self._requests.is_finished(rows.request) for rows in waiting.slices)
            if finished and not waiting.is_started:
                yield f"volume {seq} keeps rows of finished requests"
        if len(self._complete) > MAX_SEQ_SPAN:
            yield "numbers far above the watermark are kept"
