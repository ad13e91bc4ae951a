"""A request while a head serves it."""

import math
from dataclasses import dataclass, field
from typing import Literal

from molink.facts.costs import Costs
from molink.scheduler.host import HostCopy
from molink.scheduler.prefix import ROOT, Match
from molink.scheduler.request import HeadRequest
from molink.scheduler.speculation.drafting import Drafting

#: Seconds after which a job whose client takes nothing may have to give way to others.
PATIENCE = 30.0
#: Seconds within which a job without a deadline should be admitted: so nobody who comes later than
#: that goes before it.
USUAL_S = 60.0

#: ``waiting`` holds no blocks, but perhaps a copy of them in host memory; ``prefill`` has rows of
#: known tokens still to be issued; ``decode`` has issued them all, and has a row in flight or a
#: token to go on from; ``gone`` is over.
JobState = Literal["waiting", "prefill", "decode", "gone"]


@dataclass(slots=True, eq=False)
class Job:
    """A request and how far it has got.

    The attributes below ``stalled_at`` belong to one admission and begin anew with each: a
    preempted job keeps its tokens only.
    """

    request: HeadRequest
    #: All tokens so far; those beyond ``request.tokens`` have been emitted.
    tokens: list[int]
    #: The client has taken all tokens below this position.
    credited: int
    #: When it came to this head, and when its first token did.
    since: float = 0.0
    first_at: float = 0.0
    #: When it has to be admitted so that a token of it can come before its deadline; without one,
    #: :data:`USUAL_S` after it came.
    start_by: float = 0.0
    #: When it last became ``stalled``.
    stalled_at: float = 0.0
    state: JobState = "waiting"
    admissions: int = 0
    #: Tokens that the prefix cache lacked when it came.
    uncached: int = 0
    #: Prompt tokens that the prefix cache had when it was first admitted.
    cached: int = 0
    #: Its KV in host memory, while it waits after it was preempted.
    copy: HostCopy | None = None
    #: What guesses its tokens, once it has been asked.
    drafting: Drafting | None = None
    #: Whether all rows that came back were computed: others may share their KV.
    sound: bool = True
    #: The request id that stages know it by; meaningless while waiting.
    id: int = -1
    #: Tokens whose rows have been issued; a decoding job's last token is issued as a row later.
    #: Drafts don't count: the rows of those that are wrong are overwritten by what comes next.
    issued: int = 0
    blocks: list[int] = field(default_factory=list)
    #: How many of ``blocks`` the stages have been told of.
    announced: int = 0
    #: Latest tick that admits it or has rows of it.
    last: int = 0
    #: Ticks with rows of it that have not come back, and the first of these rows.
    flight: dict[int, int] = field(default_factory=dict)
    #: Those of them that may bring tokens, in order: the others followed drafts that were wrong.
    awaited: list[int] = field(default_factory=list)
    #: The drafts in ``awaited`` rows, in order: what they assume to follow ``tokens``.
    path: list[int] = field(default_factory=list)
    #: Tokens whose KV it found in the prefix cache: its first row is the one after.
    reused: int = 0
    #: Block that the first rows copy from, until they have come back; -1 if none.
    source: int = -1
    #: End of the path in the prefix tree whose blocks are the first ``depth`` of ``blocks``.
    node: int = ROOT
    depth: int = 0
    #: Whether the prefix tree has been offered the blocks of this admission's known tokens.
    offered: bool = False

    @classmethod
    def of(cls, request: HeadRequest, now: float = 0.0) -> "Job":
        """A job that waits."""
        start_by = now + (request.deadline_s or USUAL_S)
        return cls(request, list(request.tokens), len(request.tokens), since=now, start_by=start_by)

    def expect(self, cached: int, costs: Costs | None) -> None:
        """So much of its prompt is cached; the rest takes what ``costs`` say, if they are known."""
        self.uncached = len(self.tokens) - cached
        if costs is not None:
            self.start_by -= costs.prefill_s(self.uncached, cached)

    @property
    def resumed(self) -> bool:
        """Whether some of its answer was generated before it came to this head."""
        return len(self.request.tokens) > self.request.prompt_tokens

    @property
    def turn(self) -> tuple[int, float]:
        """What orders the waiting jobs of one client, least first.

        That is by priority; those that gave way to others; then who has the least slack.
        """
        return self.request.priority, -math.inf if self.admissions else self.start_by

    @property
    def generated(self) -> int:
        """Tokens sampled for it by this head."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def stalled(self) -> bool:
        """Whether the client has to take tokens before more may be sampled."""
        return len(self.tokens) - self.credited >= self.request.window

    def abandoned(self, now: float) -> bool:
        """Whether its client has taken nothing for so long that others go first."""
        return self.stalled and now - self.stalled_at >= PATIENCE

    @property
    def kv_end(self) -> int:
        """Most tokens whose KV it can ever need: the last one sampled is never run."""
        return len(self.request.tokens) + self.request.max_tokens - 1

    @property
    def computed(self) -> int:
        """Tokens whose KV is at every stage: their rows have come back."""
        return min((self.issued, *self.flight.values()))

    @property
    def fresh(self) -> bool:
        """Whether no row of it has been run since it was admitted."""
        return self.issued == self.reused

    def begin(self, request_id: int, blocks: list[int], found: Match, restored: int = 0) -> None:
        """It is admitted, with blocks for all its tokens, of which the first are ``found``.

        The next ``restored`` ones come from its copy in host memory.
        """
        self.state, self.id, self.blocks = "prefill", request_id, blocks
        self.admissions += 1
        if self.admissions == 1:
            self.cached = min(found.tokens, self.request.prompt_tokens)
        self.last = 0
        self.flight, self.awaited, self.path = {}, [], []
        self.issued = self.reused = found.tokens
        self.announced = self.depth = len(found.blocks)
        if restored and self.copy is not None:
            self.issued = self.reused = self.copy.tokens
            self.announced += restored
            if self.generated and self.issued == len(self.tokens) - 1:
                self.state = "decode"
        self.node, self.source = found.end, found.source
        self.offered = False

    def leave_path(self) -> None:
        """No rows in flight bring tokens any more."""
        self.awaited, self.path = [], []
