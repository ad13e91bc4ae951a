"""A request while a head serves it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from molink.facts.ring_times import RequestCosts
from molink.scheduler.blocks import HostCopy
from molink.scheduler.prefix_tree import ROOT, PrefixMatch
from molink.scheduler.speculation.request_drafter import RequestDrafter
from molink.wire.messages.serving import OutputToken, Rejected, Request

#: Seconds after which a job whose client takes nothing may have to give way to others.
ABANDONED_AFTER_S = 30.0
#: Seconds within which a job without a deadline should be admitted: so nobody who comes later than
#: that goes before it.
DEFAULT_START_S = 60.0
#: The least that a resubmission leaves of a timeout, in seconds: the endpoint enforces it.
MIN_TIMEOUT_S = 1e-3

#: ``waiting`` holds no blocks, but perhaps a copy of them in host memory; ``prefill`` has rows of
#: known tokens still to be issued; ``decode`` has issued them all, and has a row in flight or a
#: token to go on from; ``gone`` is over.
RequestPhase = Literal["waiting", "prefill", "decode", "gone"]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request and how far it has got.

    The attributes below ``stalled_at`` belong to one admission and begin anew with each: a
    preempted job keeps its tokens only.
    """

    #: What the client asked for, as its endpoint made it.
    request: Request
    #: The peer whose endpoint serves the client, and its id of this submission.
    peer: str
    key: str
    #: Prompt and answer so far; those from ``num_submitted`` on were emitted here.
    tokens: list[int]
    num_submitted: int
    #: The client has taken all tokens below this position.
    num_credited: int
    #: Tokens that may be uncredited before decoding pauses.
    credit_window: int
    #: Seconds from arrival that it may wait to be admitted (0: as configured), and within which
    #: its answer has to end (0: any).
    max_queue_s: float = 0.0
    deadline_s: float = 0.0
    #: When it came to this head, and when its first token did.
    arrived_at: float = 0.0
    first_token_at: float = 0.0
    #: When it has to be admitted so that a token of it can come before its deadline; without one,
    #: :data:`DEFAULT_START_S` after it came.
    start_by: float = 0.0
    #: When it last became ``stalled``.
    stalled_at: float = 0.0
    phase: RequestPhase = "waiting"
    num_admissions: int = 0
    #: Tokens that the prefix cache lacked when it came.
    num_uncached: int = 0
    #: Prompt tokens that the prefix cache had when it was first admitted.
    num_cached: int = 0
    #: Its KV in host memory, while it waits after it was preempted.
    host_copy: HostCopy | None = None
    #: What guesses its tokens, once it has been asked.
    drafter: RequestDrafter | None = None
    #: Whether all rows that came back were computed: others may share their KV.
    has_valid_kv: bool = True
    #: The request id that stages know it by; meaningless while waiting.
    id: int = -1
    #: Tokens whose rows have been issued; a decoding job's last token is issued as a row later.
    #: Drafts don't count: the rows of those that are wrong are overwritten by what comes next.
    num_issued: int = 0
    blocks: list[int] = field(default_factory=list)
    #: How many of ``blocks`` the stages have been told of.
    num_announced: int = 0
    #: Latest tick that admits it or has rows of it.
    last_seq: int = 0
    #: Ticks with rows of it that have not come back, and the first of these rows.
    in_flight: dict[int, int] = field(default_factory=dict)
    #: Those of them that may bring tokens, in order: the others followed drafts that were wrong.
    awaited_seqs: list[int] = field(default_factory=list)
    #: The drafts in ``awaited`` rows, in order: what they assume to follow ``tokens``.
    draft_path: list[int] = field(default_factory=list)
    #: Tokens whose KV it found in the prefix cache: its first row is the one after.
    num_reused: int = 0
    #: Block that the first rows copy from, until they have come back; -1 if none.
    copy_source: int = -1
    #: End of the path in the prefix tree whose blocks are the first ``depth`` of ``blocks``.
    tree_node: int = ROOT
    tree_depth: int = 0
    #: Whether the prefix tree has been offered the blocks of this admission's known tokens.
    has_cached_blocks: bool = False

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
    ) -> "RequestState":
        """The state of a request that the peer submits under ``key``.

        ``output_ids`` were generated in an earlier epoch. ``elapsed_s`` is how long ago the client
        asked.
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
        """Peer and client: a client's name counts within its peer only."""
        return self.peer, self.request.client

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
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
        """Whether some of its answer was generated in an earlier epoch."""
        return self.num_submitted > self.num_prompt_tokens

    @property
    def queue_key(self) -> tuple[int, float]:
        """What orders the waiting jobs of one client, least first.

        That is by priority; those that gave way to others; then who has the least slack.
        """
        return self.request.priority, -math.inf if self.num_admissions else self.start_by

    @property
    def num_generated(self) -> int:
        """Tokens sampled for it by this head."""
        return len(self.tokens) - self.num_submitted

    @property
    def is_stalled(self) -> bool:
        """Whether the client has to take tokens before more may be sampled."""
        return len(self.tokens) - self.num_credited >= self.credit_window

    def is_abandoned(self, now: float) -> bool:
        """Whether its client has taken nothing for so long that others go first."""
        return self.is_stalled and now - self.stalled_at >= ABANDONED_AFTER_S

    @property
    def kv_end(self) -> int:
        """Most tokens whose KV it can ever need: the last one sampled is never run."""
        return self.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is at every stage: their rows have come back."""
        return min((self.num_issued, *self.in_flight.values()))

    @property
    def is_fresh(self) -> bool:
        """Whether no row of it has been run since it was admitted."""
        return self.num_issued == self.num_reused

    def start_admission(
        self, request_id: int, blocks: list[int], found: PrefixMatch, restored: int = 0
    ) -> None:
        """It is admitted, with blocks for all its tokens, of which the first are ``found``.

        The next ``restored`` ones come from its copy in host memory.
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
        self.has_cached_blocks = False

    def clear_draft_path(self) -> None:
        """No rows in flight bring tokens any more."""
        self.awaited_seqs, self.draft_path = [], []


@dataclass(frozen=True, slots=True)
class Emission:
    """A message for the endpoint of ``peer``."""

    peer: str
    message: OutputToken | Rejected
