"""Requests on their way in: a ``Submit`` and the ``Prompt`` parts that follow it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from molink.errors import ContextTooLong, Overloaded, RequestError
from molink.scheduler.request import HeadRequest
from molink.wire.messages.data import MAX_GRAMMAR
from molink.wire.messages.serving import Prompt, Submit

#: Submissions of one daemon that may be incomplete at once, and the contexts that their ids may
#: fill together. A daemon sends one request after another, so it rarely has two.
MAX_OPEN_PER_OWNER = 64
MAX_OPEN_CONTEXTS = 4
#: Seconds that an incomplete request waits for its next part.
PART_TIMEOUT = 30.0


@dataclass(slots=True)
class _Open:
    submit: Submit
    grammar: bytes
    #: When its last part came.
    at: float
    tokens: "array[int]" = field(default_factory=lambda: array("i"))


class Intake:
    """Assembles requests from their parts, within bounds. Sans-IO.

    Memory is bounded: a request beyond ``max_context``, or beyond what a daemon may have
    incomplete, is refused by its ``Submit``, before any of its ids is kept. An id beyond the
    ``vocabulary`` is refused here, since on a GPU it would take down the whole step that it came
    in. ``now`` is in seconds of any monotonic clock.
    """

    def __init__(self, max_context: int, vocabulary: int) -> None:
        self._max_context = max_context
        self._vocabulary = vocabulary
        #: By owner and key.
        self._open: dict[str, dict[str, _Open]] = {}

    def submit(self, owner: str, message: Submit, now: float, grammar: bytes = b"") -> None:
        """Begin a request of the daemon ``owner``; a repeated key begins anew.

        ``grammar`` is what came as its payload.

        Raises:
            RequestError: it can't be taken.
            ContextTooLong: it fills the context.
            Overloaded: too much of this daemon is incomplete.
        """
        if message.prompt_tokens > message.tokens:
            raise RequestError(
                f"{message.prompt_tokens} prompt tokens in a request of {message.tokens}", "prompt"
            )
        if len(grammar) > MAX_GRAMMAR:
            raise RequestError(f"a grammar of {len(grammar)} bytes; at most {MAX_GRAMMAR}")
        if message.tokens >= self._max_context:
            raise ContextTooLong(
                f"a prompt of {message.tokens} tokens leaves nothing of the {self._max_context}"
                " that fit, prompt and answer together",
                "prompt",
            )
        self.cancel(owner, message.key)
        others = self._open.setdefault(owner, {})
        ids = message.tokens + sum(entry.submit.tokens for entry in others.values())
        if len(others) >= MAX_OPEN_PER_OWNER or ids > MAX_OPEN_CONTEXTS * self._max_context:
            raise Overloaded(f"{len(others)} requests of this daemon are incomplete already")
        others[message.key] = _Open(message, grammar, now)

    def prompt(
        self, owner: str, message: Prompt, ids: Sequence[int], now: float
    ) -> HeadRequest | None:
        """Add ids; returns the request when it is whole. Parts of unknown requests are dropped.

        Raises:
            RequestError: the parts don't fit together; the request is forgotten.
        """
        entry = self._open.get(owner, {}).get(message.key)
        if entry is None:
            return None
        submit = entry.submit
        if message.first != len(entry.tokens) or message.first + len(ids) > submit.tokens:
            self.cancel(owner, message.key)
            raise RequestError(
                f"prompt part at {message.first} does not follow {len(entry.tokens)}"
            )
        if not all(0 <= token < self._vocabulary for token in ids):
            self.cancel(owner, message.key)
            raise RequestError(f"a token id is not below {self._vocabulary}", "prompt")
        entry.tokens.extend(ids)
        entry.at = now
        if len(entry.tokens) < submit.tokens:
            return None
        self.cancel(owner, message.key)
        return HeadRequest(
            owner=owner,
            key=submit.key,
            tokens=tuple(entry.tokens),
            prompt_tokens=submit.prompt_tokens,
            max_tokens=submit.max_tokens,
            sampling=submit.sampling,
            stop_ids=submit.stop_ids,
            window=submit.window,
            grammar=entry.grammar,
            client=submit.client,
            priority=submit.priority,
            max_queue_s=submit.max_queue_s,
            deadline_s=submit.deadline_s,
        )

    def cancel(self, owner: str, key: str) -> None:
        """Forget an incomplete request."""
        self._open.get(owner, {}).pop(key, None)

    def cancel_owner(self, owner: str) -> None:
        """Forget all of a daemon's incomplete requests."""
        self._open.pop(owner, None)

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Forget requests whose next part does not come; returns their owners and keys."""
        late = [
            (owner, key)
            for owner, entries in self._open.items()
            for key, entry in entries.items()
            if now - entry.at > PART_TIMEOUT
        ]
        for owner, key in late:
            self.cancel(owner, key)
        return late
