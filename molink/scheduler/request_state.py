"""The state of a request while a scheduler serves it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from molink.facts.images import ImageSpan
from molink.facts.ring_times import RequestCosts
from molink.scheduler.blocks import HostCopy
from molink.scheduler.in_flight import RoundTripCounter
from molink.scheduler.prefix_tree import ROOT, PrefixMatch
from molink.scheduler.speculation.request_drafter import RequestDrafter
from molink.wire.messages.serving import OutputToken, Rejected, Request

#: Seconds without credit after which a stalled request may be preempted or displaced.
ABANDONED_AFTER_S = 30.0
#: Assumed deadline in seconds for the first token of a request without a deadline, which bounds how
#: many later requests may precede it.
DEFAULT_START_S = 60.0
#: Minimum timeout in seconds that a resubmission keeps; the endpoint enforces the actual one.
MIN_TIMEOUT_S = 1e-3

#: ``waiting`` requests hold no blocks, but possibly a host copy; ``prefill`` requests have prompt
#: rows to issue; ``decode`` requests have issued them all, and have a row in flight or a token to
#: decode from; ``gone`` requests have ended.
RequestPhase = Literal["waiting", "prefill", "decode", "gone"]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request and its progress.

    Attributes from ``id`` on belong to one admission and are reset by the next one: preemption
    keeps only the tokens.
    """

    #: The client's request.
    request: Request
    #: The peer whose endpoint serves the client, and its id of this submission.
    peer: str
    key: str
    #: Tokens of prompt and answer; those from ``num_submitted`` on were emitted by this scheduler.
    tokens: list[int]
    num_submitted: int
    #: The client has taken all tokens below this position.
    num_credited: int
    #: Uncredited tokens at which decoding pauses.
    credit_window: int
    #: Seconds from arrival until admission (0: as configured) and until the end of the answer (0:
    #: unlimited).
    max_queue_s: float = 0.0
    deadline_s: float = 0.0
    #: Number of the request's adapter among the model's; 0 for none.
    adapter: int = 0
    #: Spans of the prompt's images, and their rows, which only stage 0 interprets.
    image_spans: tuple[ImageSpan, ...] = ()
    image_rows: object = None
    #: Seconds that its images took before it arrived.
    encoded_s: float = 0.0
    #: When it arrived at this scheduler, and when its first token did.
    arrived_at: float = 0.0
    first_token_at: float = 0.0
    #: Latest time of admission that meets the deadline, or :data:`DEFAULT_START_S` without one.
    start_by: float = 0.0
    #: When it last stalled.
    stalled_at: float = 0.0
    phase: RequestPhase = "waiting"
    num_admissions: int = 0
    #: Tokens that were not cached on arrival.
    num_uncached: int = 0
    #: Prompt tokens that were cached at the first admission.
    num_cached: int = 0
    #: Its KV in host memory after a preemption.
    host_copy: HostCopy | None = None
    drafter: RequestDrafter | None = None
    #: Whether all returned rows were computed, so that other requests may share their KV.
    has_valid_kv: bool = True
    #: The request id that stages use; undefined while waiting.
    id: int = -1
    #: Tokens whose rows have been issued; a decoding request's last token is issued later. Drafts
    #: don't count: rows of wrong ones are overwritten.
    num_issued: int = 0
    blocks: list[int] = field(default_factory=list)
    #: Slot of its state in recurrent layers; -1 if the model has none.
    state_slot: int = -1
    #: Slot of the snapshot that its first rows continue, until they are back; -1 if none.
    snapshot: int = -1
    #: Number of tokens after which its state is copied to a snapshot (0: no copy). The snapshot's
    #: slot, from the issue of the last of these rows until it is in the prefix cache; otherwise -1.
    snapshot_end: int = 0
    kept_slot: int = -1
    #: Number of blocks that the stages know.
    num_announced: int = 0
    #: Latest ``seq`` that admits it or has rows of it.
    last_seq: int = 0
    #: Volumes in flight with rows of it, and the first position in each.
    in_flight: dict[int, int] = field(default_factory=dict)
    #: Those of them that may return tokens, in order; the others follow wrong drafts.
    awaited_seqs: list[int] = field(default_factory=list)
    #: Drafts in awaited rows, in order, which are assumed to follow ``tokens``.
    draft_path: list[int] = field(default_factory=list)
    #: Number of tokens found in the prefix cache; its first row is the next one.
    num_reused: int = 0
    #: Block from which the first rows copy, until they are back; -1 if none.
    copy_source: int = -1
    #: Node of the prefix tree at the end of the first ``tree_depth`` of ``blocks``.
    tree_node: int = ROOT
    tree_depth: int = 0
    #: Whether this admission's computed blocks have been inserted into the prefix tree.
    has_cached_blocks: bool = False
    #: Number of tokens at this admission.
    num_admitted: int = 0

    @classmethod
    def from_request(
        cls,
        request: Request,
        peer: str,
        key: str,
        output_ids: Sequence[int] = (),
        *,
        credit_window: int = 256,
        elapsed_s: float = 0.0,
        adapter: int = 0,
        image_spans: tuple[ImageSpan, ...] = (),
        image_rows: object = None,
        encoded_s: float = 0.0,
    ) -> "RequestState":
        """The state of a request that ``peer`` submits under ``key``.

        ``output_ids`` were generated in an earlier epoch; the client asked ``elapsed_s`` seconds
        ago. ``adapter`` is the number of the request's adapter, ``image_rows`` are the rows of its
        images at ``image_spans``, which took ``encoded_s`` seconds since it was submitted.
        """
        elapsed_s += encoded_s
        tokens = [*request.prompt_token_ids, *output_ids]
        max_queue_s = 0.0 if output_ids else request.max_queue_s
        return cls(
            request,
            peer,
            key,
            tokens,
            num_submitted=len(tokens),
            num_credited=len(tokens),
            credit_window=credit_window,
            max_queue_s=max_queue_s and max(MIN_TIMEOUT_S, max_queue_s - elapsed_s),
            deadline_s=request.deadline_s and max(MIN_TIMEOUT_S, request.deadline_s - elapsed_s),
            adapter=adapter,
            image_spans=image_spans,
            image_rows=image_rows,
            encoded_s=encoded_s,
        )

    def set_arrival(self, now: float, cached: int = 0, costs: RequestCosts | None = None) -> None:
        """Start the clocks; ``cached`` tokens need no prefill, the others cost by ``costs``."""
        self.arrived_at = now
        self.start_by = now + (self.deadline_s or DEFAULT_START_S)
        self.num_uncached = len(self.tokens) - cached
        if costs is not None:
            self.start_by -= costs.prefill_s(self.num_uncached, cached)

    @property
    def client_key(self) -> tuple[str, str]:
        """Peer and client: clients are identified within their peer only."""
        return self.peer, self.request.client

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of the answer's tokens, including those of earlier epochs."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def max_remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.request.max_tokens - self.num_output_tokens

    @property
    def is_resubmitted(self) -> bool:
        """Whether part of its answer was generated in an earlier epoch."""
        return self.num_submitted > self.num_prompt_tokens

    @property
    def queue_key(self) -> tuple[int, float]:
        """Sort key of a client's waiting requests: priority, preempted first, then slack."""
        return self.request.priority, -math.inf if self.num_admissions else self.start_by

    @property
    def num_generated(self) -> int:
        """Number of tokens sampled by this scheduler."""
        return len(self.tokens) - self.num_submitted

    @property
    def num_since_admission(self) -> int:
        """Number of tokens sampled since the latest admission."""
        return len(self.tokens) - self.num_admitted

    @property
    def is_stalled(self) -> bool:
        """Whether decoding pauses until the client takes tokens."""
        return len(self.tokens) - self.num_credited >= self.credit_window

    def is_abandoned(self, now: float) -> bool:
        """Whether it has been stalled so long that it may be preempted or displaced."""
        return self.is_stalled and now - self.stalled_at >= ABANDONED_AFTER_S

    @property
    def kv_end(self) -> int:
        """Maximum number of tokens with KV; the last sampled one needs none."""
        return self.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def num_computed(self) -> int:
        """Number of tokens whose KV is complete at every stage, since their rows are back."""
        return min((self.num_issued, *self.in_flight.values()))

    @property
    def is_fresh(self) -> bool:
        """Whether none of its rows has run since its admission."""
        return self.num_issued == self.num_reused

    @property
    def held_slots(self) -> list[int]:
        """All state slots that it references."""
        return [slot for slot in (self.state_slot, self.snapshot, self.kept_slot) if slot >= 0]

    def start_admission(
        self, request_id: int, blocks: list[int], found: PrefixMatch, restored: int = 0
    ) -> None:
        """Start an admission with blocks for all tokens.

        The first ``found`` blocks come from the prefix cache, the next ``restored`` ones from the
        host copy.
        """
        self.phase, self.id, self.blocks = "prefill", request_id, blocks
        self.num_admissions += 1
        if self.num_admissions == 1:
            self.num_cached = min(found.num_tokens, self.num_prompt_tokens)
        self.last_seq = 0
        self.in_flight, self.awaited_seqs, self.draft_path = {}, [], []
        self.num_issued = self.num_reused = found.num_tokens
        self.num_announced = self.tree_depth = len(found.blocks)
        if restored and self.host_copy is not None:
            self.num_issued = self.num_reused = self.host_copy.num_tokens
            self.num_announced += restored
            if self.num_generated and self.num_issued == len(self.tokens) - 1:
                self.phase = "decode"
        self.tree_node, self.copy_source = found.end_node, found.copy_source
        self.snapshot = found.snapshot
        self.has_cached_blocks = False
        self.num_admitted = len(self.tokens)

    def clear_draft_path(self) -> None:
        """Stop awaiting tokens of rows in flight."""
        self.awaited_seqs, self.draft_path = [], []


@dataclass(frozen=True, slots=True)
class Emission:
    """A message for the endpoint of ``peer``; ``pooled`` is an embedding's row (f32)."""

    peer: str
    message: OutputToken | Rejected
    pooled: bytes | None = None


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """An ended admission whose release was not issued yet, with a copy of the request's last state.

    ``counter`` counts the iterations until a cancelled request's blocks are back.
    """

    state: RequestState
    counter: RoundTripCounter | None = None

    @property
    def held_blocks(self) -> list[int]:
        """All blocks that it references."""
        state = self.state
        return state.blocks if state.copy_source < 0 else [*state.blocks, state.copy_source]
