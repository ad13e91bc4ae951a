"""Computes the tokens that a grammar allows, on the last stage."""

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

#: Maximum compiled grammars in the cache, and maximum bytes of their texts; a compiled grammar
#: takes up to 200 times its text.
MAX_KEPT, MAX_KEPT_BYTES = 32, 512 * 1024
#: Seconds that a step waits for a compilation, including loading the tokenizer, since a stage that
#: computes longer is declared dead. After that the request fails and is retried.
COMPILE_TIMEOUT_S = 1.5


class GrammarCompiler:
    """Compiles requests' grammars on a background thread, with an LRU cache.

    The model's tokenizer is loaded with the first grammar.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """``folder`` is the model's; its logits have ``vocabulary`` tokens."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizer: llguidance.LLTokenizer | None = None
        #: Compiled grammars by text, least recently used first; only the thread accesses them.
        self._cache: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()

    def start_matcher(self, grammar: bytes) -> "GrammarMatcher":
        """Start compiling an untrusted grammar in the background."""
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
    """State of one grammar-constrained answer."""

    def __init__(self, compiled: "Future[llguidance.LLMatcher]") -> None:
        self._compiled = compiled
        self._matcher: llguidance.LLMatcher | None = None
        #: Tokens that the matcher has not consumed yet.
        self._pending_tokens: list[int] = []
        #: Drafts and masks of :meth:`precompute_masks`.
        self._precomputed: tuple[Sequence[int], list[bytes]] | None = None

    def close(self) -> None:
        """Cancel the compilation if it has not started."""
        self._compiled.cancel()

    def add_tokens(self, tokens: Iterable[int]) -> None:
        """Append tokens of the answer."""
        self._pending_tokens += tokens
        self._precomputed = None

    def compute_masks(self, drafts: Sequence[int] = ()) -> list[bytes]:
        """Compute masks of allowed tokens, now and after each of ``drafts``.

        Bit i of a mask is token i, lowest bits first; masks after a rejected draft are empty.
        Blocks until the grammar is compiled.

        Raises:
            RequestError: the grammar is invalid, too complex, or rejects the tokens added.
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
        """Precompute :meth:`compute_masks` for ``drafts`` or a prefix of them."""
        if self._matcher is not None:
            with contextlib.suppress(RequestError):  # the next call reports the error
                self._precomputed = drafts, self.compute_masks(drafts)

    def forced_tokens(self, max_tokens: int) -> list[int]:
        """Return up to ``max_tokens`` tokens that the grammar forces next.

        Empty before the first :meth:`compute_masks`.

        Raises:
            RequestError: as :meth:`compute_masks`.
        """
        if self._matcher is None:
            return []
        with raise_as(RequestError):
            return self._advance_matcher().compute_ff_tokens()[:max_tokens]

    def _advance_matcher(self) -> "llguidance.LLMatcher":
        """Consume pending tokens; return the matcher."""
        if self._matcher is None:
            self._matcher = _await_matcher(self._compiled)
        ahead, self._pending_tokens = self._pending_tokens, []
        if ahead and not self._matcher.consume_tokens(ahead):
            reason = _matcher_error(self._matcher)
            raise RequestError(f"the answer does not match its grammar: {reason}")
        return self._matcher


def load_grammar_tokenizer(folder: Path, size: int) -> "llguidance.LLTokenizer":
    """Load the vocabulary of the model in ``folder``, padded to ``size`` tokens.

    Raises:
        BrokenModel: its tokenizer can't be loaded, or has no end-of-sequence token.
    """
    tokenizer = Tokenizer.open(folder)
    size = max(size, tokenizer.vocab_size)
    end_ids = [token for token in tokenizer.eos_ids if 0 <= token < size]
    if not end_ids:
        raise BrokenModel(f"{folder}: the model has no end-of-sequence token")
    with raise_as(BrokenModel):
        tokens = [tokenizer.token_bytes(token) for token in range(size)]
        special = sorted(token for token in tokenizer.special_ids if token < size)
        return create_grammar_tokenizer(
            tokens, end_ids, special, lambda text: tokenizer.encode(text, special=False)
        )


def _compute_mask(matcher: "llguidance.LLMatcher") -> bytes:
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(f"grammar error: {_matcher_error(matcher)}")
    return mask


def _await_matcher(compiled: "Future[llguidance.LLMatcher]") -> "llguidance.LLMatcher":
    try:
        return compiled.result(COMPILE_TIMEOUT_S)
    except TimeoutError:
        raise RequestError(f"the grammar was not compiled within {COMPILE_TIMEOUT_S:g} s") from None


def _matcher_error(matcher: "llguidance.LLMatcher") -> str:
    return " ".join(matcher.get_error().split())[:300]
