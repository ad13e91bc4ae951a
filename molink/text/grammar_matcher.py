"""Which tokens may come next in an answer that is held to a grammar, at the stage that samples."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import TYPE_CHECKING

from molink.errors import BrokenModel, RequestError
from molink.native import raise_as
from molink.text.grammar import compile_grammar, create_grammar_tokenizer
from molink.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

#: Grammars that are kept compiled, and bytes of their texts together; compiled, they have up to
#: two hundred times as many.
MAX_KEPT, MAX_KEPT_BYTES = 32, 512 * 1024
#: Seconds that a step waits for a compilation, the loading of the tokenizer included: a stage that
#: computes for longer counts as dead. A request that doesn't get it fails, and is tried again.
COMPILE_TIMEOUT_S = 1.5


class GrammarCompiler:
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
        self._cache: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()

    def start_matcher(self, grammar: bytes) -> "GrammarMatcher":
        """An answer held to ``grammar``: hostile bytes, compiled while others compute."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "grammars")
        return GrammarMatcher(self._pool.submit(self._compile_matcher, grammar))

    def _compile_matcher(self, grammar: bytes) -> "llguidance.LLMatcher":
        found = self._cache.pop(grammar, None)
        if found is None:
            if self._tokenizer is None:
                self._tokenizer = load_grammar_tokenizer(self._folder, self._vocabulary)
            found = compile_grammar(self._tokenizer, grammar)
        self._cache[grammar] = found
        while len(self._cache) > MAX_KEPT or sum(map(len, self._cache)) > MAX_KEPT_BYTES:
            self._cache.popitem(last=False)
        return found.deep_copy()


class GrammarMatcher:
    """One answer that is held to a grammar, as far as it has got."""

    def __init__(self, compiled: "Future[llguidance.LLMatcher]") -> None:
        self._compiled = compiled
        self._matcher: llguidance.LLMatcher | None = None
        #: Tokens of the answer that the matcher hasn't seen.
        self._pending_tokens: list[int] = []
        #: What :meth:`prepare` has found out.
        self._precomputed: tuple[Sequence[int], list[bytes]] | None = None

    def close(self) -> None:
        """Nobody wants it any more: it isn't compiled if that hasn't begun."""
        self._compiled.cancel()

    def add_tokens(self, tokens: Iterable[int]) -> None:
        """Learn the answer's next tokens."""
        self._pending_tokens += tokens
        self._precomputed = None

    def compute_masks(self, drafts: Sequence[int] = ()) -> list[bytes]:
        """Which tokens may come next, and which after each of ``drafts``, if these come next.

        A bit for each token, the first one's the lowest of a byte; none after a draft that may not
        come itself. Waits for the compilation, if that is still under way.

        Raises:
            RequestError: the grammar is no good, is too complex, or doesn't allow what was added.
        """
        if self._precomputed is not None:
            foreseen, masks = self._precomputed
            if tuple(foreseen[: len(drafts)]) == tuple(drafts):
                return masks[: 1 + len(drafts)]
        with raise_as(RequestError):
            matcher = self._advance_matcher()
            masks = [_compute_mask(matcher)]
            for draft in drafts:
                if not matcher.try_consume_tokens([draft]):
                    break
                masks.append(_compute_mask(matcher))
            if len(masks) > 1:
                matcher.rollback(len(masks) - 1)
            return masks + [b""] * (1 + len(drafts) - len(masks))

    def precompute_masks(self, drafts: Sequence[int]) -> None:
        """Find out what :meth:`compute_masks` will be asked for, if ``drafts`` are guessed, or
        fewer."""
        if self._matcher is not None:
            with contextlib.suppress(RequestError):  # then it is asked again, and says why
                self._precomputed = drafts, self.compute_masks(drafts)

    def forced_tokens(self, max_tokens: int) -> list[int]:
        """Up to ``most`` tokens that have to come next, as the model's tokenizer writes them.

        None before :meth:`compute_masks` was asked once.

        Raises:
            RequestError: as :meth:`compute_masks`.
        """
        if self._matcher is None:
            return []
        with raise_as(RequestError):
            return self._advance_matcher().compute_ff_tokens()[:max_tokens]

    def _advance_matcher(self) -> "llguidance.LLMatcher":
        """The matcher, after all tokens that were added."""
        if self._matcher is None:
            self._matcher = _await_matcher(self._compiled)
        ahead, self._pending_tokens = self._pending_tokens, []
        if ahead and not self._matcher.consume_tokens(ahead):
            reason = _matcher_error(self._matcher)
            raise RequestError(f"the answer isn't what its grammar allows: {reason}")
        return self._matcher


def load_grammar_tokenizer(folder: Path, size: int) -> "llguidance.LLTokenizer":
    """The vocabulary of the model in ``folder``, with ``size`` tokens at least.

    Raises:
        BrokenModel: its tokenizer can't be loaded, or has no token that ends an answer.
    """
    tokenizer = Tokenizer.open(folder)
    size = max(size, tokenizer.vocab_size)
    end_ids = [token for token in tokenizer.eos_ids if 0 <= token < size]
    if not end_ids:
        raise BrokenModel(f"{folder}: the model has no token that ends an answer")
    with raise_as(BrokenModel):
        tokens = [tokenizer.token_bytes(token) for token in range(size)]
        special = sorted(token for token in tokenizer.special_ids if token < size)
        return create_grammar_tokenizer(
            tokens, end_ids, special, lambda text: tokenizer.encode(text, special=False)
        )


def _compute_mask(matcher: "llguidance.LLMatcher") -> bytes:
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(f"a grammar can't go on: {_matcher_error(matcher)}")
    return mask


def _await_matcher(compiled: "Future[llguidance.LLMatcher]") -> "llguidance.LLMatcher":
    try:
        return compiled.result(COMPILE_TIMEOUT_S)
    except TimeoutError:
        raise RequestError(f"a grammar isn't compiled in {COMPILE_TIMEOUT_S:g} s") from None


def _matcher_error(matcher: "llguidance.LLMatcher") -> str:
    return " ".join(matcher.get_error().split())[:300]
