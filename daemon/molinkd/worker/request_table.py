"""A stage's state of each request."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from molink.facts.images import ImageSpan
from molink.wire.messages.data_plane import Admit, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from molink.stage.sampling.token_history import TokenHistory
    from molink.text.grammar_matcher import GrammarCompiler, GrammarMatcher


def _empty_history() -> "TokenHistory":
    """Import torch only once a request exists; by then the executor has imported it."""
    from molink.stage.sampling.token_history import TokenHistory

    return TokenHistory()


@dataclass(slots=True)
class StageRequest:
    """One request at one stage.

    ``max_positions`` is the length it may reach, ``blocks`` its block table so far, ``state_slot``
    where recurrent layers keep its state, copied from the slot ``copy_from_state`` before its first
    rows (-1: no more, or never), ``adapter`` the number of its adapter,
    ``images`` those of its prompt. On the last stage,
    ``history`` holds its tokens where penalties or a grammar must be restored, ``known_tokens``
    those at its admission in order, ``matcher`` its grammar, and ``last_sampled`` the position and
    token sampled last. ``failed`` is set once a step failed here or at an earlier stage: its KV is
    invalid from then on.
    """

    sampling_params: SamplingParams
    prompt_tokens: int
    max_positions: int = 0
    state_slot: int = 0
    copy_from_state: int = -1
    adapter: int = 0
    images: "tuple[StageImage, ...]" = ()
    blocks: "array[int]" = field(default_factory=partial(array, "i"))
    history: "TokenHistory" = field(default_factory=_empty_history)
    known_tokens: "array[int]" = field(default_factory=partial(array, "i"))
    failed: bool = False
    matcher: "GrammarMatcher | None" = None
    last_sampled: tuple[int, int] = (-1, -1)

    @property
    def image_spans(self) -> tuple[ImageSpan, ...]:
        """Where the images of its prompt lie."""
        return tuple(image.span for image in self.images)


@dataclass(slots=True)
class StageImage:
    """An image of a prompt; ``rows`` (``[n, hidden]``) at the first stage, until they have run."""

    span: ImageSpan
    rows: "Tensor | None" = None


class RequestTable:
    """Requests of one epoch at one stage.

    The event loop adds and removes entries, the compute thread changes them. The scoreboard keeps
    both apart: no row runs before its request is admitted, and no request is released while a row
    of it may run.
    """

    def __init__(self, grammars: "GrammarCompiler | None" = None) -> None:
        """``grammars`` is given on the last stage only."""
        self._grammars = grammars
        self._requests: dict[int, StageRequest] = {}

    def admit_request(self, message: Admit) -> None:
        """Add a request."""
        self._requests[message.request] = StageRequest(
            message.sampling_params,
            message.prompt_tokens,
            message.max_positions,
            message.state_slot,
            message.copy_from_state,
            message.adapter,
        )

    def add_history(self, request: int, first: int, ids: memoryview) -> None:
        """Add tokens (``i32``) from position ``first`` on; fragments arrive in order."""
        state = self._requests[request]
        split = max(0, min(len(ids), state.prompt_tokens - first))
        state.known_tokens.extend(ids)
        if state.sampling_params.needs_history:
            state.history.add_prompt(ids[:split])
            state.history.add_generated(ids[split:])
        if state.matcher is not None:
            state.matcher.add_tokens(ids[split:])

    def set_grammar(self, request: int, text: bytes) -> None:
        """Start compiling the grammar that constrains the output."""
        if self._grammars is None:
            self._requests[request].failed = True
        else:
            self._requests[request].matcher = self._grammars.start_matcher(text)

    def set_images(self, request: int, spans: Sequence[ImageSpan], rows: object) -> None:
        """Set the images of the prompt; ``rows`` has a tensor of each at the first stage."""
        every = rows if isinstance(rows, list) else [None] * len(spans)
        self._requests[request].images = tuple(
            StageImage(span, one) for span, one in zip(spans, every, strict=True)
        )

    def append_blocks(self, request: int, blocks: Sequence[int]) -> None:
        """Append blocks to the request's block table before any of its rows runs."""
        self._requests[request].blocks.extend(blocks)

    def release_request(self, request: int) -> None:
        """Remove a request."""
        state = self._requests.pop(request, None)
        if state is not None and state.matcher is not None:
            state.matcher.close()

    def find_request(self, request: int) -> StageRequest | None:
        """Return the request, or ``None`` if it is unknown."""
        return self._requests.get(request)

    def __getitem__(self, request: int) -> StageRequest:
        return self._requests[request]

    def __len__(self) -> int:
        return len(self._requests)
