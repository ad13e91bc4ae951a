"""Micro-batches: volumes and control messages for the first stage."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from molink.facts.images import narrow_id
from molink.scheduler.blocks import HostCopy
from molink.scheduler.in_flight import InFlightTracker
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.request_state import PendingRelease, RequestState
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    MAX_SLICES,
    Admit,
    BlockTable,
    Grammar,
    History,
    PromptImages,
    Release,
    RequestSlice,
    StateCopy,
    SwapIn,
    SwapOut,
    Volume,
)

#: Bytes of a 4 KiB header that slices may take; the frame takes the rest.
_SLICE_BYTES_MAX = 4000
#: Maximum bytes of a slice without block ids and drafts: array, request, start, count, after,
#: array, sample, copy source, array. Each block id or draft takes at most ``_ID_BYTES``.
_SLICE_BYTES = 1 + 5 + 5 + 5 + 9 + 3 + 1 + 1 + 1
_ID_BYTES = 5
#: Maximum bytes of a copy of a state: array, request, end, slot.
_STATE_COPY_BYTES = 1 + 5 + 5 + 5
#: Decode rows without drafts that always fit a volume.
MIN_DECODE_ROOM = _SLICE_BYTES_MAX // (_SLICE_BYTES + 2 * _ID_BYTES)


@dataclass(frozen=True, slots=True)
class ControlWithPayload:
    """A control message with its payload: ``ids``, or raw ``data``."""

    body: Admit | Grammar | History | PromptImages | BlockTable | SwapIn | SwapOut | Release
    ids: Sequence[int] | None = None
    data: object = None

    @property
    def payload(self) -> object:
        return self.data if self.ids is None else array("i", self.ids).tobytes()


@dataclass(frozen=True, slots=True)
class VolumeWithTokens:
    """A volume and the token ids of its rows, in order."""

    header: Volume
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Control messages, then at most one decode and one prefill volume, in order of ``seq``."""

    controls: tuple[ControlWithPayload, ...]
    volumes: tuple[VolumeWithTokens, ...]


@dataclass(frozen=True, slots=True)
class _PendingSlice:
    state: RequestState
    start: int
    count: int
    blocks: tuple[int, ...]
    sample: bool
    released_seq: int
    copy_source: int
    drafts: tuple[int, ...] = ()


class VolumeBuilder:
    """Collects slices of requests until the volume's header is full."""

    def __init__(self, *, prefill: bool) -> None:
        self.prefill = prefill
        self._slices: list[_PendingSlice] = []
        self._state_copies: list[StateCopy] = []
        self._bytes = 0
        #: Maximum number of tokens that the volume samples.
        self._num_samples = 0

    def __len__(self) -> int:
        return len(self._slices)

    def __contains__(self, state: RequestState) -> bool:
        return any(pending_slice.state is state for pending_slice in self._slices)

    @property
    def requests(self) -> list[RequestState]:
        return [pending_slice.state for pending_slice in self._slices]

    @property
    def block_room(self) -> int:
        """Block ids that one more slice may carry; the volume is full below 1.

        Room for the id of a block to copy from and, in prefill volumes, for a state copy is always
        reserved.
        """
        if self._num_samples >= MAX_SLICES:
            return 0
        slice_bytes = _SLICE_BYTES + _STATE_COPY_BYTES * self.prefill
        return (_SLICE_BYTES_MAX - self._bytes - slice_bytes) // _ID_BYTES - 1

    @property
    def draft_room(self) -> int:
        """Number of drafts, with one block each, that the slices can still take."""
        left = (_SLICE_BYTES_MAX - self._bytes) // (2 * _ID_BYTES)
        return max(0, min(MAX_SLICES - self._num_samples, left))

    def add_rows(
        self, state: RequestState, count: int, blocks: Sequence[int], released: int
    ) -> None:
        """Issue the next ``count`` rows of a request and announce ``blocks`` to the stages.

        ``released`` is the latest ``seq`` that released one of ``blocks``. The recurrent state
        after these rows is copied if the request has a slot for the copy.
        """
        end = state.num_issued + count
        sample = end == len(state.tokens)
        source = state.copy_source if state.num_issued == state.num_reused else -1
        pending_slice = _PendingSlice(
            state, state.num_issued, count, tuple(blocks), sample, released, source
        )
        self._slices.append(pending_slice)
        self._bytes += _SLICE_BYTES + _ID_BYTES * (len(blocks) + (source >= 0))
        if state.kept_slot >= 0 and end == state.snapshot_end:
            self._state_copies.append(StateCopy(state.id, end, state.kept_slot))
            self._bytes += _STATE_COPY_BYTES
        self._num_samples += 1
        state.num_issued = end
        state.num_announced += len(blocks)

    def add_drafts(
        self, state: RequestState, drafts: Sequence[int], blocks: Sequence[int], released: int
    ) -> None:
        """Append ``drafts`` to a request's rows and announce ``blocks`` for them."""
        for index, pending_slice in enumerate(self._slices):
            if pending_slice.state is state:
                self._slices[index] = replace(
                    pending_slice,
                    blocks=(*pending_slice.blocks, *blocks),
                    released_seq=max(pending_slice.released_seq, released),
                    drafts=tuple(drafts),
                )
        self._bytes += _ID_BYTES * (len(drafts) + len(blocks))
        self._num_samples += len(drafts)
        state.num_announced += len(blocks)

    def add_lookahead_drafts(
        self, state: RequestState, drafts: Sequence[int], blocks: Sequence[int], released: int
    ) -> None:
        """Add a slice of drafts only, which continues the request's rows in flight."""
        start = len(state.tokens) + len(state.draft_path)
        pending_slice = _PendingSlice(
            state, start, 0, tuple(blocks), True, released, -1, tuple(drafts)
        )
        self._slices.append(pending_slice)
        self._bytes += _SLICE_BYTES + _ID_BYTES * (len(drafts) + len(blocks))
        self._num_samples += len(drafts)
        state.num_announced += len(blocks)

    def build_volume(
        self, seq: int, *, interleaved: bool = False, mtp_bounds: tuple[int, float] = (0, 0.0)
    ) -> VolumeWithTokens:
        """Build the volume ``seq`` and record it as in flight for its requests.

        ``mtp_bounds`` are the volume's ``max_mtp_drafts`` and ``min_probability``.
        """
        slices, tokens = [], list[int]()
        for pending_slice in self._slices:
            state = pending_slice.state
            end = pending_slice.start + pending_slice.count
            after = max(state.last_seq, pending_slice.released_seq)
            slices.append(
                RequestSlice(
                    state.id,
                    pending_slice.start,
                    pending_slice.count + len(pending_slice.drafts),
                    after,
                    pending_slice.blocks,
                    pending_slice.sample,
                    pending_slice.copy_source,
                    pending_slice.drafts,
                )
            )
            tokens += state.tokens[pending_slice.start : end]
            tokens += pending_slice.drafts
            state.last_seq = seq
            state.in_flight[seq] = pending_slice.start
            state.awaited_seqs.append(seq)
            state.draft_path += pending_slice.drafts
        payload = Payload("i32", (len(tokens),))
        copies = tuple(self._state_copies)
        header = Volume(seq, self.prefill, tuple(slices), payload, interleaved, copies, *mtp_bounds)
        return VolumeWithTokens(header, tokens)


#: Ids per History or BlockTable message: 240 kB, below the message limit.
MAX_MESSAGE_IDS = 60_000


class ControlIssuer:
    """Issues the control messages of admissions and releases."""

    def __init__(
        self,
        cache: KVCacheManager,
        in_flight: InFlightTracker,
        *,
        sends_tokens: bool = False,
        whole_images: bool = False,
    ) -> None:
        """With ``sends_tokens`` the last stage gets the tokens of all requests."""
        self._cache, self._whole_images = cache, whole_images
        self._in_flight = in_flight
        self._sends_tokens = sends_tokens

    def issue_release(self, pending: PendingRelease) -> list[ControlWithPayload]:
        """Release an admission; KV that is swapped out is copied to host memory first."""
        state = pending.state
        control, last, copy = [], state.last_seq, state.host_copy
        if copy is not None:
            last = copy.filled_seq = self._in_flight.issue_seq()
            ids = (*state.blocks[: len(copy.blocks)], *copy.blocks)
            out = SwapOut(last, state.id, _pairs_payload(ids))
            control.append(ControlWithPayload(out, ids))
        seq = self._in_flight.issue_seq()
        self._cache.release_request(seq, pending)
        self._in_flight.record_release(seq, pending.counter)
        others = tuple(sorted(state.in_flight.keys() - {state.last_seq}))
        return [*control, ControlWithPayload(Release(seq, state.id, last, others))]

    def issue_admission(
        self, state: RequestState, copy: HostCopy | None
    ) -> list[ControlWithPayload]:
        """Announce an admitted request; ``copy`` is the host copy from which it resumes, if any."""
        request = state.request
        state.last_seq = self._in_flight.issue_seq()
        admit = Admit(
            state.last_seq,
            state.id,
            request.sampling_params,
            state.num_prompt_tokens,
            state.kv_end,
            max(0, state.state_slot),
            state.adapter,
            state.snapshot,
        )
        control = [ControlWithPayload(admit)]
        if request.grammar:
            state.last_seq = self._in_flight.issue_seq()
            grammar = Grammar(state.last_seq, state.id, Payload("u8", (len(request.grammar),)))
            control.append(ControlWithPayload(grammar, data=request.grammar))
        if state.image_spans:
            state.last_seq = self._in_flight.issue_seq()
            images = PromptImages(state.last_seq, state.id, state.image_spans, self._whole_images)
            control.append(ControlWithPayload(images, data=state.image_rows))
        replays = request.grammar and state.num_output_tokens
        if self._sends_tokens or request.sampling_params.needs_history or replays:
            tokens = [*map(narrow_id, state.tokens)] if state.image_spans else state.tokens
            for first, ids in _split_ids(tokens):
                state.last_seq = self._in_flight.issue_seq()
                history = History(state.last_seq, state.id, first, Payload("i32", (len(ids),)))
                control.append(ControlWithPayload(history, ids))
        num_announced = state.tree_depth if copy is None else len(copy.blocks)
        for _, ids in _split_ids(state.blocks[:num_announced]):
            state.last_seq = self._in_flight.issue_seq()
            table = BlockTable(state.last_seq, state.id, Payload("i32", (len(ids),)))
            control.append(ControlWithPayload(table, ids))
        if copy is not None:
            state.last_seq = self._in_flight.issue_seq()
            ids = (
                *state.blocks[state.tree_depth : num_announced],
                *copy.blocks[state.tree_depth :],
            )
            swap = SwapIn(state.last_seq, state.id, copy.filled_seq, _pairs_payload(ids))
            control.append(ControlWithPayload(swap, ids))
        return control


def _pairs_payload(ids: Sequence[int]) -> Payload:
    return Payload("i32", (2, len(ids) // 2))


def _split_ids(ids: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Split ``ids`` into messages; yield the position and ids of each."""
    for first in range(0, len(ids), MAX_MESSAGE_IDS):
        yield first, tuple(ids[first : first + MAX_MESSAGE_IDS])
