"""What a stage knows of each request beyond the rows of the moment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from molink.wire.messages.data_plane import Admit, SamplingParams

if TYPE_CHECKING:
    from molink.stage.sampling.token_history import TokenHistory
    from molink.text.grammar_matcher import GrammarCompiler, GrammarMatcher


def _empty_history() -> "TokenHistory":
    """Without torch until there is a request; what computes has imported it by then."""
    from molink.stage.sampling.token_history import TokenHistory

    return TokenHistory()


@dataclass(slots=True)
class StageRequest:
    """One request at one stage.

    ``max_positions`` is how many tokens' keys it may come to have, ``blocks`` its block table so
    far. ``history`` and ``matcher`` are filled at the tail only: the first only if its penalties
    are recomputed from it or its grammar goes through it again, the other if it has a grammar.
    ``failed`` is set once a step of it failed here or at an earlier stage: its KV can't be trusted
    from then on. ``last_sampled`` are position and token that were sampled last, at the tail only.
    """

    sampling_params: SamplingParams
    prompt_tokens: int
    max_positions: int = 0
    blocks: list[int] = field(default_factory=list)
    history: "TokenHistory" = field(default_factory=_empty_history)
    failed: bool = False
    matcher: "GrammarMatcher | None" = None
    last_sampled: tuple[int, int] = (-1, -1)


class RequestTable:
    """Requests of one epoch at one stage.

    Entries are added and removed by the event loop and changed by the compute thread. The
    scoreboard keeps the two apart: no row runs before its request is admitted, and no request is
    released while a row of it may run.
    """

    def __init__(self, grammars: "GrammarCompiler | None" = None) -> None:
        """``grammars`` compiles those of requests; at the tail only."""
        self._grammars = grammars
        self._requests: dict[int, StageRequest] = {}

    def admit_request(self, message: Admit) -> None:
        """A request begins."""
        self._requests[message.request] = StageRequest(
            message.sampling_params, message.prompt_tokens, message.max_positions
        )

    def add_history(self, request: int, first: int, ids: memoryview) -> None:
        """Learn tokens (``i32``) from position ``first`` on; parts come in order."""
        state = self._requests[request]
        split = max(0, min(len(ids), state.prompt_tokens - first))
        state.history.add_prompt(ids[:split])
        state.history.add_generated(ids[split:])
        if state.matcher is not None:
            state.matcher.add_tokens(ids[split:])

    def set_grammar(self, request: int, text: bytes) -> None:
        """Learn what the answer is held to; it is compiled from now on."""
        if self._grammars is None:
            self._requests[request].failed = True
        else:
            self._requests[request].matcher = self._grammars.start_matcher(text)

    def append_blocks(self, request: int, blocks: Sequence[int]) -> None:
        """Learn blocks that its table begins with; no row of it has run."""
        self._requests[request].blocks.extend(blocks)

    def release_request(self, request: int) -> None:
        """A request is over."""
        state = self._requests.pop(request, None)
        if state is not None and state.matcher is not None:
            state.matcher.close()

    def find_request(self, request: int) -> StageRequest | None:
        """One that lives."""
        return self._requests.get(request)

    def __getitem__(self, request: int) -> StageRequest:
        return self._requests[request]

    def __len__(self) -> int:
        return len(self._requests)
