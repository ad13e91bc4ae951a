"""Incremental detokenization that never emits partial characters."""

import codecs
from typing import Protocol

import tokenizers

from molink.errors import BrokenModel
from molink.native import raise_as
from molink.text.token_pieces import TokenPieces

#: Maximum tokens per character; with more, its bytes count as invalid.
MAX_HELD_TOKENS = 8


class Detokenizer(Protocol):
    """Turns an answer's tokens into text as they arrive."""

    def add_token(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while a character is incomplete."""

    def flush_text(self) -> str:
        """Return U+FFFD for an incomplete character at the end."""


class IncrementalDetokenizer:
    """Detokenizes in O(1) per token, for decoders in :mod:`molink.text.token_pieces`.

    With ``continues`` the text follows a prompt, so a leading space is kept; otherwise the result
    equals what ``tokenizers`` decodes from all tokens at once. Invalid UTF-8 becomes U+FFFD as the
    Unicode standard recommends. (``tokenizers`` replaces a whole run of byte-fallback tokens if one
    is invalid, which can't be known in advance.)
    """

    def __init__(
        self, pieces: TokenPieces, skip: frozenset[int] = frozenset(), *, continues: bool = False
    ) -> None:
        self._pieces = pieces
        self._skipped_ids = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = not continues and bool(pieces.drop_in_first)
        self._strip_left = 0 if continues else pieces.strip_count

    def add_token(self, token: int) -> str:
        if token in self._skipped_ids:
            return ""
        if self._is_first:
            self._is_first = False
            return self._utf8.decode(self._pieces.get_first_bytes(token))
        text = self._utf8.decode(self._pieces.get_bytes(token))
        return self._strip_leading(text) if self._strip_left and text else text

    def flush_text(self) -> str:
        text = self._utf8.decode(b"", final=True)
        return self._strip_leading(text) if self._strip_left else text

    def _strip_leading(self, text: str) -> str:
        while self._strip_left and text.startswith(self._pieces.strip):
            text = text[len(self._pieces.strip) :]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


class WindowDetokenizer:
    """Detokenizes with any decoder: decodes a short window with and without the new tokens.

    The window begins at the last token that produced text, for decoders that treat the first token
    differently.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skip
        self._window: list[int] = []
        self._emitted = 0

    def add_token(self, token: int) -> str:
        if token in self._skipped_ids:
            return ""
        self._window.append(token)
        held = len(self._window) - self._emitted
        return self._emit_text(force=held > MAX_HELD_TOKENS)

    def flush_text(self) -> str:
        return self._emit_text(force=True)

    def _emit_text(self, *, force: bool) -> str:
        before = self._decode_tokens(self._window[: self._emitted])
        after = self._decode_tokens(self._window)
        if not force and after.endswith("\ufffd"):
            return ""
        if len(after) <= len(before):
            if force:
                self._emitted = len(self._window)
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return after[len(before) :]

    def _decode_tokens(self, tokens: list[int]) -> str:
        with raise_as(BrokenModel):
            return self._tokenizer.decode(tokens, skip_special_tokens=False)
