"""Requests on their way in: a ``Submit`` and the ``Prompt`` parts that follow it."""

from dataclasses import dataclass, field

from molink.errors import ContextTooLong, RequestError
from molink.head.request import HeadRequest
from molink.wire.data import Prompt, Submit

#: Submissions of one daemon that may be incomplete at once.
MAX_OPEN_PER_OWNER = 1024


@dataclass(slots=True)
class _Open:
    submit: Submit
    tokens: list[int] = field(default_factory=list)


class Intake:
    """Assembles requests from their parts, within bounds. Sans-IO.

    Memory is bounded: a request beyond ``max_context`` is refused by its ``Submit``, before any of
    its ids is kept. An id beyond the ``vocabulary`` is refused here, since on a GPU it would
    take down the whole step that it came in.
    """

    def __init__(self, max_context: int, vocabulary: int) -> None:
        self._max_context = max_context
        self._vocabulary = vocabulary
        self._open: dict[tuple[str, str], _Open] = {}

    def submit(self, owner: str, message: Submit) -> None:
        """Begin a request of the daemon ``owner``; a repeated key begins anew.

        Raises:
            RequestError: it can't be taken.
            ContextTooLong: it fills the context.
        """
        if message.prompt_tokens > message.tokens:
            raise RequestError(
                f"{message.prompt_tokens} prompt tokens in a request of {message.tokens}", "prompt"
            )
        if message.tokens >= self._max_context:
            raise ContextTooLong(
                f"{message.tokens} tokens leave nothing of a context of {self._max_context}",
                "prompt",
            )
        self._open.pop((owner, message.key), None)
        if sum(1 for name, _ in self._open if name == owner) >= MAX_OPEN_PER_OWNER:
            raise RequestError("too many incomplete requests from this daemon")
        self._open[owner, message.key] = _Open(message)

    def prompt(self, owner: str, message: Prompt, ids: list[int]) -> HeadRequest | None:
        """Add ids; returns the request when it is whole. Parts of unknown requests are dropped.

        Raises:
            RequestError: the parts don't fit together; the request is forgotten.
        """
        key = (owner, message.key)
        entry = self._open.get(key)
        if entry is None:
            return None
        submit = entry.submit
        if message.first != len(entry.tokens) or message.first + len(ids) > submit.tokens:
            del self._open[key]
            raise RequestError(
                f"prompt part at {message.first} does not follow {len(entry.tokens)}"
            )
        if not all(0 <= token < self._vocabulary for token in ids):
            del self._open[key]
            raise RequestError(f"a token id is not below {self._vocabulary}", "prompt")
        entry.tokens.extend(ids)
        if len(entry.tokens) < submit.tokens:
            return None
        del self._open[key]
        return HeadRequest(
            owner=owner,
            key=submit.key,
            tokens=tuple(entry.tokens),
            prompt_tokens=submit.prompt_tokens,
            max_tokens=submit.max_tokens,
            sampling=submit.sampling,
            stop_ids=submit.stop_ids,
            window=submit.window,
        )

    def cancel(self, owner: str, key: str) -> None:
        """Forget an incomplete request."""
        self._open.pop((owner, key), None)

    def cancel_owner(self, owner: str) -> None:
        """Forget all of a daemon's incomplete requests."""
        for key in [key for key in self._open if key[0] == owner]:
            del self._open[key]
