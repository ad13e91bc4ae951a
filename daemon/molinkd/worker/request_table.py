"""What a stage knows of each request beyond the rows of the moment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from molink.wire.messages.data import Admit, Sampling

if TYPE_CHECKING:
    from molink.stage.sampling.history import TokenHistory
    from molink.text.matcher import Constraint, Grammars


def _no_tokens() -> "TokenHistory":
    """Without torch until there is a request; what computes has imported it by then."""
    from molink.stage.sampling.history import TokenHistory

    return TokenHistory()


@dataclass(slots=True)
class RequestState:
    """One request at one stage.

    ``reach`` is how many tokens' keys it may come to have, ``blocks`` its block table so far.
    ``history`` and ``constraint`` are filled at the tail only: the first only if its penalties are
    recomputed from it or its grammar goes through it again, the other if it has a grammar.
    ``failed`` is set once a step of it failed here or at an earlier stage: its KV can't be trusted
    from then on. ``last`` are position and token that were sampled last, at the tail only.
    """

    sampling: Sampling
    prompt_tokens: int
    reach: int = 0
    blocks: list[int] = field(default_factory=list)
    history: "TokenHistory" = field(default_factory=_no_tokens)
    failed: bool = False
    constraint: "Constraint | None" = None
    last: tuple[int, int] = (-1, -1)


class RequestTable:
    """Requests of one epoch at one stage.

    Entries are added and removed by the event loop and changed by the compute thread. The
    scoreboard keeps the two apart: no row runs before its request is admitted, and no request is
    released while a row of it may run.
    """

    def __init__(self, grammars: "Grammars | None" = None) -> None:
        """``grammars`` compiles those of requests; at the tail only."""
        self._grammars = grammars
        self._states: dict[int, RequestState] = {}

    def admit(self, message: Admit) -> None:
        """A request begins."""
        self._states[message.request] = RequestState(
            message.sampling, message.prompt_tokens, message.reach
        )

    def history(self, request: int, first: int, ids: memoryview) -> None:
        """Learn tokens (``i32``) from position ``first`` on; parts come in order."""
        state = self._states[request]
        split = max(0, min(len(ids), state.prompt_tokens - first))
        state.history.add_prompt(ids[:split])
        state.history.add_generated(ids[split:])
        if state.constraint is not None:
            state.constraint.add(ids[split:])

    def grammar(self, request: int, text: bytes) -> None:
        """Learn what the answer is held to; it is compiled from now on."""
        if self._grammars is None:
            self._states[request].failed = True
        else:
            self._states[request].constraint = self._grammars.begin(text)

    def table(self, request: int, blocks: Sequence[int]) -> None:
        """Learn blocks that its table begins with; no row of it has run."""
        self._states[request].blocks.extend(blocks)

    def release(self, request: int) -> None:
        """A request is over."""
        state = self._states.pop(request, None)
        if state is not None and state.constraint is not None:
            state.constraint.close()

    def get(self, request: int) -> RequestState | None:
        """One that lives."""
        return self._states.get(request)

    def __getitem__(self, request: int) -> RequestState:
        return self._states[request]

    def __len__(self) -> int:
        return len(self._states)
