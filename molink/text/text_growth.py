"""Bounds how much a tokenizer's normalization can lengthen a text.

``tokenizer.json`` is untrusted: a chain of replacements grows a text exponentially in its length.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import msgspec

from molink.errors import BrokenModel

#: Maximum accepted growth factor; public tokenizers reach at most 1296.
MAX_TEXT_GROWTH = 4096
#: Maximum length of a subword prefix or suffix, which each character of a word may get.
_MAX_AFFIX = 64
#: Maximum characters that a step makes out of one.
_STEP_GROWTH = {
    "BertNormalizer": 12,
    "ByteLevel": 4,
    "Lowercase": 3,
    "Metaspace": 2,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
}


class _SubwordModel(msgspec.Struct):
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _TokenizerSteps(msgspec.Struct):
    """Parts of ``tokenizer.json`` that change a text."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    model: _SubwordModel | None = None


def max_text_growth(source: bytes, where: str) -> int:
    """Compute the maximum number of characters that one character can become.

    Raises:
        BrokenModel: growth is excessive, or ``source`` is not a ``tokenizer.json``.
    """
    try:
        steps = msgspec.json.decode(source, type=_TokenizerSteps)
        growth = _multiply_growth(steps.normalizer) * _multiply_growth(steps.pre_tokenizer)
        worst = max(growth, _multiply_growth(steps.decoder))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenModel(f"{where}: {error}; fetch the file again") from error
    affixes = steps.model or _SubwordModel()
    for affix in (affixes.continuing_subword_prefix, affixes.end_of_word_suffix):
        if len(affix or "") > _MAX_AFFIX:
            raise BrokenModel(f"{where}: an affix of subwords is longer than {_MAX_AFFIX}")
    if worst > MAX_TEXT_GROWTH:
        raise BrokenModel(f"{where}: its steps make a text over {MAX_TEXT_GROWTH} times as long")
    return growth


def _multiply_growth(part: Any) -> int:
    product = 1
    for step in _flatten_steps(part):
        product = min(product * _step_growth(step), 2 * MAX_TEXT_GROWTH)
    return product


def _flatten_steps(part: Any) -> Iterator[dict[str, Any]]:
    if part is None:
        return
    for name in ("normalizers", "pretokenizers", "decoders"):
        if part["type"] == "Sequence" and name in part:
            for inner in part[name]:
                yield from _flatten_steps(inner)
            return
    yield part


def _step_growth(step: dict[str, Any]) -> int:
    kind = step["type"]
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Precompiled":
        return _longest_replacement(step["precompiled_charsmap"])
    if kind != "Replace":
        return _STEP_GROWTH.get(kind, 1)
    pattern, content = step["pattern"], step["content"]
    if "String" not in pattern:
        return 1 + len(content)
    if not pattern["String"]:
        raise ValueError("Replace has an empty pattern")
    return max(1, -(-len(content) // len(pattern["String"])))


def _longest_replacement(encoded: str) -> int:
    """Return a SentencePiece map's longest replacement.

    The map is a trie's size, the trie, and zero-terminated texts.
    """
    try:
        raw = base64.b64decode(encoded)
    except binascii.Error as error:
        raise ValueError(f"Precompiled: {error}") from error
    texts = 4 + int.from_bytes(raw[:4], "little")
    if texts > len(raw):
        raise ValueError("Precompiled: its map is truncated")
    return max(1, max(map(len, raw[texts:].split(b"\0"))))
