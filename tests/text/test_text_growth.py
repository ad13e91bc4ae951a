"""Tokenizers that would expand a text too much are refused before they get one."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from molink.errors import BrokenModel, ContextTooLong
from molink.text import tokenizer as tokenizer_module
from molink.text.text_growth import max_text_growth
from molink.text.tokenizer import Tokenizer

LLAMA = [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def chain(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(raw: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


def growth(**parts: Any) -> int:
    return max_text_growth(json.dumps(parts).encode(), "the-file")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, 1),
        ({"normalizer": None, "pre_tokenizer": BYTES, "decoder": BYTES}, 4),
        ({"normalizer": {"type": "NFC"}, "pre_tokenizer": BYTES}, 12),
        ({"normalizer": chain(*LLAMA)}, 2),
        ({"normalizer": replace({"Regex": " {2,}"}, "▁")}, 2),
        ({"normalizer": replace({"String": "ab"}, "xyz")}, 2),
        ({"normalizer": chain({"type": "Nmt"}, charsmap(bytes(4) + b"abc\0de\0"))}, 3),
    ],
)
def test_growth_is_the_product_of_all_steps(parts: dict[str, Any], expected: int) -> None:
    assert growth(**parts) == expected


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": replace({"String": "a"}, "a" * 5000)},
        {"normalizer": chain(*[replace({"String": "a"}, "aa")] * 20)},
        {"normalizer": chain(chain(*[replace({"Regex": "a"}, "aa")] * 10))},
        {"normalizer": chain(*[{"type": "ByteLevel"}] * 20)},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 20}},
        {"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "aa")] * 20}},
        {"normalizer": {"type": "Prepend", "prepend": "x" * 9999}},
        {"normalizer": replace({"String": ""}, "x")},
        {"decoder": replace({"String": ""}, "")},
        {"normalizer": charsmap(b"\xff\xff\xff\xff")},
        {"normalizer": charsmap(b"")},
        {"normalizer": charsmap(bytes(4) + b"x" * 9999)},
        {"model": {"continuing_subword_prefix": "x" * 1000}},
        {"model": {"end_of_word_suffix": "x" * 1000}},
        {"normalizer": 5},
        {"normalizer": {"no": "type"}},
        {"normalizer": {"type": []}},
        {"normalizer": {"type": "Sequence", "normalizers": 5}},
    ],
)
def test_growth_without_measure_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(BrokenModel, match=r"^the-file: "):
        growth(**parts)


def test_a_text_is_bounded_before_it_is_encoded(
    tmp_path: Path, byte_tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_GROWN_CHARACTERS", 400)
    raw = json.loads(byte_tokenizer.to_str())
    raw["normalizer"] = replace({"String": "a"}, "aaaaa")
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a" * 20)) == "a" * 100
    with pytest.raises(ContextTooLong, match="21 characters"):
        tokenizer.encode("a" * 21)
