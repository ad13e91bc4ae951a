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
#: Assumed deadline (s) for the first token of a request without one, which bounds how many later
#: requests may precede it.
DEFAULT_START_S = 60.0
#: Minimum timeout (s) that a resubmission keeps; the endpoint enforces the actual one.
MIN_TIMEOUT_S = 1e-3

#: ``waiting`` holds no blocks, but possibly a host copy; ``prefill`` has prompt rows to issue;
#: ``decode`` has issued them all, and has a row in flight or a token to decode from; ``gone`` has
#: ended.
RequestPhase = Literal["waiting", "prefill", "decode", "gone"]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request and its progress.

    Attributes from ``id`` on belong to one admission and are reset by the next one: preemption
    keeps only the tokens.
    """

    #: What the client asked for.
    request: Request
    #: The peer whose endpoint serves the client, and its id of this submission.
    peer: str
    key: str
    #: Prompt and answer so far; those from ``num_submitted`` on were emitted here.
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
    #: Where the images of its prompt lie, and their rows, which only stage 0 understands.
    image_spans: tuple[ImageSpan, ...] = ()
    image_rows: object = None
    #: When it arrived at this scheduler, and when its first token did.
    arrived_at: float = 0.0
    first_token_at: float = 0.0
    #: Latest admission for a token before the deadline, or for :data:`DEFAULT_START_S` without one.
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
    #: Whether all returned rows were computed, so that others may share their KV.
    has_valid_kv: bool = True
    #: The request id that stages use; meaningless while waiting.
    id: int = -1
    #: Tokens whose rows have been issued; a decoding request's last token is issued later. Drafts
    #: don't count: rows of wrong ones are overwritten.
    num_issued: int = 0
    blocks: list[int] = field(default_factory=list)
    #: Slot of its state in recurrent layers; -1 if the model has none.
    state_slot: int = -1
    #: Slot of the snapshot that its first rows continue, until they are back; -1 if none.
    snapshot: int = -1
    #: Tokens after which its state is copied to a snapshot, 0 if it isn't; and the snapshot's slot,
    #: from the issue of the last of these rows until it is in the prefix cache, else -1.
    snapshot_end: int = 0
    kept_slot: int = -1
    #: Blocks that the stages know of.
    num_announced: int = 0
    #: Latest ``seq`` that admits it or has rows of it.
    last_seq: int = 0
    #: Volumes in flight with rows of it, and the first position in each.
    in_flight: dict[int, int] = field(default_factory=dict)
    #: Those that may bring tokens, in order; the others follow wrong drafts.
    awaited_seqs: list[int] = field(default_factory=list)
    #: Drafts in awaited rows, in order, which are assumed to follow ``tokens``.
    draft_path: list[int] = field(default_factory=list)
    #: Tokens found in the prefix cache; its first row is the next one.
    num_reused: int = 0
    #: Block that the first rows copy from until they are back; -1 if none.
    copy_source: int = -1
    #: Node of the prefix tree at the end of the first ``tree_depth`` of ``blocks``.
    tree_node: int = ROOT
    tree_depth: int = 0
    #: Whether this admission's computed blocks have been inserted into the prefix tree.
    has_cached_blocks: bool = False
    #: Tokens that it had at this admission.
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
    ) -> "RequestState":
        """The state of a request that ``peer`` submits under ``key``.

        ``output_ids`` were generated in an earlier epoch; the client asked ``elapsed_s`` seconds
        ago. ``adapter`` is the number of the request's adapter, ``image_rows`` are the rows of its
        images at ``image_spans``.
        """
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
        )

    def set_arrival(self, now: float, cached: int = 0, costs: RequestCosts | None = None) -> None:
        """Start the clocks; ``cached`` tokens need no prefill, the others cost ``costs``."""
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
        """Tokens of the answer, those of earlier epochs included."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def max_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - self.num_output_tokens

    @property
    def is_resubmitted(self) -> bool:
        """Whether part of its answer was generated in an earlier epoch."""
        return self.num_submitted > self.num_prompt_tokens

    @property
    def queue_key(self) -> tuple[int, float]:
        """Orders the waiting requests of one client: by priority, preempted ones first, then by
        slack."""
        return self.request.priority, -math.inf if self.num_admissions else self.start_by

    @property
    def num_generated(self) -> int:
        """Tokens sampled by this scheduler."""
        return len(self.tokens) - self.num_submitted

    @property
    def num_since_admission(self) -> int:
        """Tokens sampled since the latest admission, which a preemption does not lose."""
        return len(self.tokens) - self.num_admitted

    @property
    def is_stalled(self) -> bool:
        """Whether decoding pauses until the client takes tokens."""
        return len(self.tokens) - self.num_credited >= self.credit_window

    def is_abandoned(self, now: float) -> bool:
        """Whether it has been stalled for so long that it may be preempted or displaced."""
        return self.is_stalled and now - self.stalled_at >= ABANDONED_AFTER_S

    @property
    def kv_end(self) -> int:
        """Maximum number of tokens with KV; the last sampled one needs none."""
        return self.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is complete at every stage: their rows are back."""
        return min((self.num_issued, *self.in_flight.values()))

    @property
    def is_fresh(self) -> bool:
        """Whether none of its rows has been run since its admission."""
        return self.num_issued == self.num_reused

    @property
    def held_slots(self) -> list[int]:
        """All state slots that it references."""
        return [slot for slot in (self.state_slot, self.snapshot, self.kept_slot) if slot >= 0]

    def start_admission(
        self, request_id: int, blocks: list[int], found: PrefixMatch, restored: int = 0
    ) -> None:
        """Start an admission with blocks for all tokens, the first ``found`` in the prefix cache.

        The next ``restored`` blocks come from the host copy.
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
    """A message for the endpoint of ``peer``; ``pooled`` is the row of an embedding (f32)."""

    peer: str
    message: OutputToken | Rejected
    pooled: bytes | None = None


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """An ended admission whose release is not issued yet: a copy of its request's last state.

    ``counter`` counts the iterations until a cancelled request's blocks are back.
    """

    state: RequestState
    counter: RoundTripCounter | None = None

    @property
    def held_blocks(self) -> list[int]:
        """All blocks that it references."""
        state = self.state
        return state.blocks if state.copy_source < 0 else [*state.blocks, state.copy_source]
