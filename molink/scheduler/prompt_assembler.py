"""Requests on their way in: a ``Submit`` and the ``PromptFragment`` parts that follow it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from molink.errors import ContextTooLong, Overloaded, RequestError
from molink.scheduler.request import SchedulerRequest
from molink.wire.messages.data_plane import MAX_GRAMMAR_BYTES
from molink.wire.messages.serving import PromptFragment, Submit

#: Submissions of one daemon that may be incomplete at once, and the contexts that their ids may
#: fill together. A daemon sends one request after another, so it rarely has two.
MAX_INCOMPLETE_PER_PEER = 64
MAX_INCOMPLETE_CONTEXTS = 4
#: Seconds that an incomplete request waits for its next part.
PART_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _IncompleteRequest:
    submit: Submit
    grammar: bytes
    #: When its last part came.
    updated_at: float
    tokens: "array[int]" = field(default_factory=lambda: array("i"))


class PromptAssembler:
    """Assembles requests from their parts, within bounds. Sans-IO.

    Memory is bounded: a request beyond ``max_context``, or beyond what a daemon may have
    incomplete, is refused by its ``Submit``, before any of its ids is kept. An id beyond the
    ``vocabulary`` is refused here, since on a GPU it would take down the whole step that it came
    in. ``now`` is in seconds of any monotonic clock.
    """

    def __init__(self, max_model_len: int, vocabulary: int) -> None:
        self._max_model_len = max_model_len
        self._vocabulary = vocabulary
        #: By owner and key.
        self._incomplete: dict[str, dict[str, _IncompleteRequest]] = {}

    def begin_request(self, peer: str, message: Submit, now: float, grammar: bytes = b"") -> None:
        """Begin a request of the daemon ``owner``; a repeated key begins anew.

        ``grammar`` is what came as its payload.

        Raises:
            RequestError: it can't be taken.
            ContextTooLong: it fills the context.
            Overloaded: too much of this daemon is incomplete.
        """
        if message.prompt_tokens > message.num_tokens:
            raise RequestError(
                f"{message.prompt_tokens} prompt tokens in a request of {message.num_tokens}",
                "prompt",
            )
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise RequestError(f"a grammar of {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES}")
        if message.num_tokens >= self._max_model_len:
            raise ContextTooLong(
                f"a prompt of {message.num_tokens} tokens leaves nothing of the "
                f"{self._max_model_len}"
                " that fit, prompt and answer together",
                "prompt",
            )
        self.cancel_request(peer, message.key)
        others = self._incomplete.setdefault(peer, {})
        ids = message.num_tokens + sum(entry.submit.num_tokens for entry in others.values())
        if (
            len(others) >= MAX_INCOMPLETE_PER_PEER
            or ids > MAX_INCOMPLETE_CONTEXTS * self._max_model_len
        ):
            raise Overloaded(f"{len(others)} requests of this daemon are incomplete already")
        others[message.key] = _IncompleteRequest(message, grammar, now)

    def add_fragment(
        self, peer: str, message: PromptFragment, ids: Sequence[int], now: float
    ) -> SchedulerRequest | None:
        """Add ids; returns the request when it is whole. Parts of unknown requests are dropped.

        Raises:
            RequestError: the parts don't fit together; the request is forgotten.
        """
        entry = self._incomplete.get(peer, {}).get(message.key)
        if entry is None:
            return None
        submit = entry.submit
        if message.first != len(entry.tokens) or message.first + len(ids) > submit.num_tokens:
            self.cancel_request(peer, message.key)
            raise RequestError(
                f"prompt part at {message.first} does not follow {len(entry.tokens)}"
            )
        if not all(0 <= token < self._vocabulary for token in ids):
            self.cancel_request(peer, message.key)
            raise RequestError(f"a token id is not below {self._vocabulary}", "prompt")
        entry.tokens.extend(ids)
        entry.updated_at = now
        if len(entry.tokens) < submit.num_tokens:
            return None
        self.cancel_request(peer, message.key)
        return SchedulerRequest(
            peer=peer,
            key=submit.key,
            tokens=tuple(entry.tokens),
            prompt_tokens=submit.prompt_tokens,
            max_tokens=submit.max_tokens,
            sampling=submit.sampling,
            stop_ids=submit.stop_token_ids,
            credit_window=submit.credit_window,
            grammar=entry.grammar,
            client=submit.client,
            priority=submit.priority,
            max_queue_s=submit.max_queue_s,
            deadline_s=submit.deadline_s,
        )

    def cancel_request(self, peer: str, key: str) -> None:
        """Forget an incomplete request."""
        self._incomplete.get(peer, {}).pop(key, None)

    def cancel_peer(self, peer: str) -> None:
        """Forget all of a daemon's incomplete requests."""
        self._incomplete.pop(peer, None)

    def expire_requests(self, now: float) -> list[tuple[str, str]]:
        """Forget requests whose next part does not come; returns their owners and keys."""
        late = [
            (peer, key)
            for peer, entries in self._incomplete.items()
            for key, entry in entries.items()
            if now - entry.updated_at > PART_TIMEOUT_S
        ]
        for peer, key in late:
            self.cancel_request(peer, key)
        return late
