"""Token ids to text, one by one, never emitting half a character."""

import codecs
from typing import Protocol

import tokenizers

from molink.errors import BrokenModel
from molink.native import raise_as
from molink.text.token_pieces import TokenPieces

#: Tokens that a character may be spread over before its bytes count as invalid.
MAX_HELD_TOKENS = 8


class Detokenizer(Protocol):
    """Turns the tokens of one answer into text as they come."""

    def add_token(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete."""

    def flush_text(self) -> str:
        """What an incomplete character leaves (U+FFFD), when no more tokens follow."""


class IncrementalDetokenizer:
    """For decoders that :mod:`molink.text.token_pieces` knows: O(1) per token.

    With ``continues`` the text goes on from a prompt, so a leading space stays; otherwise the
    result is what ``tokenizers`` would decode from all tokens at once. Bytes that are no UTF-8
    become U+FFFD as the Unicode standard recommends (``tokenizers`` replaces a whole run of
    byte-fallback tokens if one of them is invalid, which can't be known in advance).
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
        """The text that ``token`` completes."""
        if token in self._skipped_ids:
            return ""
        if self._is_first:
            self._is_first = False
            return self._utf8.decode(self._pieces.get_first_bytes(token))
        text = self._utf8.decode(self._pieces.get_bytes(token))
        return self._strip_leading(text) if self._strip_left and text else text

    def flush_text(self) -> str:
        """U+FFFD if a character is incomplete, else nothing."""
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
    """For any other decoder: decodes a short window of tokens with and without the new ones.

    The window begins at the last token that was emitted with text, for the sake of decoders that
    treat a first token differently.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skip
        self._window: list[int] = []
        self._emitted = 0

    def add_token(self, token: int) -> str:
        """The text that ``token`` completes."""
        if token in self._skipped_ids:
            return ""
        self._window.append(token)
        held = len(self._window) - self._emitted
        return self._emit_text(force=held > MAX_HELD_TOKENS)

    def flush_text(self) -> str:
        """The text of tokens that were held back."""
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
