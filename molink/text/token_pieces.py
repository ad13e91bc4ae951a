"""Derives the bytes of each token from a tokenizer's decoder.

Incremental decoding through ``tokenizers`` decodes a window twice per token, and guesses from
U+FFFD whether a character is complete. The decoders of supported families concatenate the tokens'
bytes, except at the very beginning. So bytes are derived once per token id, and a UTF-8 decoder
tracks completeness.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Transform = Callable[[str], str | bytes]


@dataclass(slots=True)
class TokenPieces:
    """Bytes of a tokenizer's tokens, computed lazily.

    Up to ``strip_count`` characters ``strip`` are removed from the start of a text;
    ``drop_in_first`` is removed from the first token (SentencePiece's ``▁``).
    """

    vocabulary: tokenizers.Tokenizer
    transform: Transform
    strip: str = ""
    strip_count: int = 0
    drop_in_first: str = ""
    _cache: dict[int, bytes] = field(default_factory=dict)

    def get_bytes(self, token: int) -> bytes:
        """Return the bytes of ``token`` within a text; empty for an unknown id."""
        known = self._cache.get(token)
        if known is None:
            known = self._cache[token] = self._compute_bytes(self.vocabulary.id_to_token(token))
        return known

    def get_first_bytes(self, token: int) -> bytes:
        """Return the bytes of ``token`` at the start of a text."""
        if not self.drop_in_first:
            return self.get_bytes(token)
        text = self.vocabulary.id_to_token(token)
        return self._compute_bytes(text.replace(self.drop_in_first, "") if text else text)

    def _compute_bytes(self, token: str | None) -> bytes:
        if token is None:
            return b""
        piece = self.transform(token)
        return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")


def create_token_pieces(tokenizer: tokenizers.Tokenizer) -> TokenPieces | None:
    """Create the pieces of ``tokenizer``; ``None`` if its decoder is not supported."""
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenPieces(tokenizer, _byte_level_pieces(_byte_level_table()))
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        drop = "" if steps[0].get("prepend_scheme", "always") == "never" else mark
        return TokenPieces(tokenizer, lambda token: token.replace(mark, " "), drop_in_first=drop)
    return _sentencepiece_pieces(tokenizer, steps, kinds)


def _sentencepiece_pieces(
    tokenizer: tokenizers.Tokenizer, steps: Sequence[Mapping[str, Any]], kinds: Sequence[str]
) -> TokenPieces | None:
    """Handle the decoder of Llama, Mistral and Gemma: ``Replace, ByteFallback, Fuse[, Strip]``."""
    if kinds not in (
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
    ):
        return None
    pattern = steps[0]["pattern"].get("String")
    if not pattern:
        return None
    transform = _byte_fallback_transform(pattern, steps[0]["content"])
    if len(steps) == 3:
        return TokenPieces(tokenizer, transform)
    strip = steps[3]
    if strip["stop"]:
        return None
    return TokenPieces(tokenizer, transform, strip=strip["content"], strip_count=strip["start"])


def _byte_fallback_transform(pattern: str, content: str) -> Transform:
    def transform(token: str) -> str | bytes:
        token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token

    return transform


def _byte_level_pieces(table: Mapping[str, int]) -> Transform:
    def transform(token: str) -> str | bytes:
        try:
            return bytes(table[char] for char in token)
        except KeyError:  # an added token, whose text is plain
            return token

    return transform


def _byte_level_table() -> dict[str, int]:
    """Return GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table
