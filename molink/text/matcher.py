"""Which tokens may come next in an answer that is held to a grammar, at the stage that samples."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import TYPE_CHECKING

from molink.errors import BrokenModel, RequestError
from molink.native import failing_as
from molink.text.grammar import compile_grammar, make_tokenizer
from molink.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

#: Grammars that are kept compiled, and bytes of their texts together; compiled, they have up to
#: two hundred times as many.
MAX_KEPT, MAX_KEPT_BYTES = 32, 512 * 1024
#: Seconds that a step waits for a compilation, the loading of the tokenizer included: a stage that
#: computes for longer counts as dead. A request that doesn't get it fails, and is tried again.
WAIT_S = 1.5


class Grammars:
    """Compiles the grammars of requests to one model, on a thread of its own.

    The last ones are kept. The model's tokenizer is loaded with the first one.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """``folder`` is the model's; its logits are of ``vocabulary`` tokens."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizer: llguidance.LLTokenizer | None = None
        #: By text, last used last; touched by the thread only.
        self._kept: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()

    def begin(self, grammar: bytes) -> "Constraint":
        """An answer held to ``grammar``: hostile bytes, compiled while others compute."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "grammars")
        return Constraint(self._pool.submit(self._matcher, grammar))

    def _matcher(self, grammar: bytes) -> "llguidance.LLMatcher":
        found = self._kept.pop(grammar, None)
        if found is None:
            if self._tokenizer is None:
                self._tokenizer = load_vocabulary(self._folder, self._vocabulary)
            found = compile_grammar(self._tokenizer, grammar)
        self._kept[grammar] = found
        while len(self._kept) > MAX_KEPT or sum(map(len, self._kept)) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        return found.deep_copy()


class Constraint:
    """One answer that is held to a grammar, as far as it has got."""

    def __init__(self, compiled: "Future[llguidance.LLMatcher]") -> None:
        self._compiled = compiled
        self._matcher: llguidance.LLMatcher | None = None
        #: Tokens of the answer that the matcher hasn't seen.
        self._ahead: list[int] = []
        #: What :meth:`prepare` has found out.
        self._ready: tuple[Sequence[int], list[bytes]] | None = None

    def close(self) -> None:
        """Nobody wants it any more: it isn't compiled if that hasn't begun."""
        self._compiled.cancel()

    def add(self, tokens: Iterable[int]) -> None:
        """Learn the answer's next tokens."""
        self._ahead += tokens
        self._ready = None

    def allowed(self, drafts: Sequence[int] = ()) -> list[bytes]:
        """Which tokens may come next, and which after each of ``drafts``, if these come next.

        A bit for each token, the first one's the lowest of a byte; none after a draft that may not
        come itself. Waits for the compilation, if that is still under way.

        Raises:
            RequestError: the grammar is no good, is too complex, or doesn't allow what was added.
        """
        if self._ready is not None:
            foreseen, masks = self._ready
            if tuple(foreseen[: len(drafts)]) == tuple(drafts):
                return masks[: 1 + len(drafts)]
        with failing_as(RequestError):
            matcher = self._advanced()
            masks = [_mask(matcher)]
            for draft in drafts:
                if not matcher.try_consume_tokens([draft]):
                    break
                masks.append(_mask(matcher))
            if len(masks) > 1:
                matcher.rollback(len(masks) - 1)
            return masks + [b""] * (1 + len(drafts) - len(masks))

    def prepare(self, drafts: Sequence[int]) -> None:
        """Find out what :meth:`allowed` will be asked for, if ``drafts`` are guessed, or fewer."""
        if self._matcher is not None:
            with contextlib.suppress(RequestError):  # then it is asked again, and says why
                self._ready = drafts, self.allowed(drafts)

    def forced(self, most: int) -> list[int]:
        """Up to ``most`` tokens that have to come next, as the model's tokenizer writes them.

        None before :meth:`allowed` was asked once.

        Raises:
            RequestError: as :meth:`allowed`.
        """
        if self._matcher is None:
            return []
        with failing_as(RequestError):
            return self._advanced().compute_ff_tokens()[:most]

    def _advanced(self) -> "llguidance.LLMatcher":
        """The matcher, after all tokens that were added."""
        if self._matcher is None:
            self._matcher = _result(self._compiled)
        ahead, self._ahead = self._ahead, []
        if ahead and not self._matcher.consume_tokens(ahead):
            reason = _error(self._matcher)
            raise RequestError(f"the answer isn't what its grammar allows: {reason}")
        return self._matcher


def load_vocabulary(folder: Path, size: int) -> "llguidance.LLTokenizer":
    """The vocabulary of the model in ``folder``, with ``size`` tokens at least.

    Raises:
        BrokenModel: its tokenizer can't be loaded, or has no token that ends an answer.
    """
    tokenizer = Tokenizer.open(folder)
    size = max(size, tokenizer.vocab_size)
    end_ids = [token for token in tokenizer.eos_ids if 0 <= token < size]
    if not end_ids:
        raise BrokenModel(f"{folder}: the model has no token that ends an answer")
    with failing_as(BrokenModel):
        tokens = [tokenizer.token_bytes(token) for token in range(size)]
        special = sorted(token for token in tokenizer.special_ids if token < size)
        return make_tokenizer(
            tokens, end_ids, special, lambda text: tokenizer.encode(text, special=False)
        )


def _mask(matcher: "llguidance.LLMatcher") -> bytes:
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(f"a grammar can't go on: {_error(matcher)}")
    return mask


def _result(compiled: "Future[llguidance.LLMatcher]") -> "llguidance.LLMatcher":
    try:
        return compiled.result(WAIT_S)
    except TimeoutError:
        raise RequestError(f"a grammar isn't compiled in {WAIT_S:g} s") from None


def _error(matcher: "llguidance.LLMatcher") -> str:
    return " ".join(matcher.get_error().split())[:300]
