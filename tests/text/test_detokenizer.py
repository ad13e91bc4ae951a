"""Incremental detokenization compared with ``tokenizers``' decoding of all tokens at once."""

import string
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from molink.text.detokenizer import Detokenizer, IncrementalDetokenizer, WindowDetokenizer
from molink.text.token_pieces import create_token_pieces

_SETTINGS = settings(
    max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
_CHARS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(string.ascii_letters + "  \n▁"),
    st.sampled_from(
        ["👩‍💻", "🏳️‍🌈", "e\u0301", "hello", " the", "你好", "<|end|>", "<s>", "\ufffd"]
    ),
)
_TEXTS = st.lists(_CHARS, max_size=40).map("".join)


def feed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add_token(token) for token in ids), detokenizer.flush_text()]


def skip_of(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(index for index, token in added.items() if token.special)


@_SETTINGS
@given(text=_TEXTS)
def test_equals_decode(known: tokenizers.Tokenizer, text: str) -> None:
    ids = known.encode(text, add_special_tokens=False).ids
    pieces = create_token_pieces(known)
    assert pieces is not None
    for skip in (True, False):
        skipped = skip_of(known) if skip else frozenset()
        out = feed(IncrementalDetokenizer(pieces, skipped), ids)
        assert "".join(out) == known.decode(ids, skip_special_tokens=skip)


@_SETTINGS
@given(prompt=_TEXTS, text=_TEXTS)
def test_an_answer_that_continues_keeps_its_leading_space(
    known: tokenizers.Tokenizer, prompt: str, text: str
) -> None:
    prompt = "hello" + prompt
    before = known.encode(prompt, add_special_tokens=False).ids
    ids = known.encode(text, add_special_tokens=False).ids
    pieces = create_token_pieces(known)
    assert pieces is not None
    out = "".join(feed(IncrementalDetokenizer(pieces, skip_of(known), continues=True), ids))
    assert known.decode(before) + out == known.decode([*before, *ids])


@_SETTINGS
@given(ids=st.lists(st.integers(0, 450), max_size=60))
def test_any_bytes_of_a_byte_level_model(
    byte_tokenizer: tokenizers.Tokenizer, ids: list[int]
) -> None:
    tokenizer = byte_tokenizer
    pieces = create_token_pieces(tokenizer)
    assert pieces is not None
    out = feed(IncrementalDetokenizer(pieces, skip_of(tokenizer)), ids)
    assert "".join(out) == tokenizer.decode(ids)


@_SETTINGS
@given(ids=st.lists(st.integers(0, 300), max_size=60))
def test_any_ids_are_survived(known: tokenizers.Tokenizer, ids: list[int]) -> None:
    pieces = create_token_pieces(known)
    assert pieces is not None
    for text in feed(IncrementalDetokenizer(pieces), ids):
        text.encode()


def test_never_half_a_character(known: tokenizers.Tokenizer) -> None:
    pieces = create_token_pieces(known)
    assert pieces is not None
    ids = known.encode("a 🦊👩‍💻 你 b", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(pieces)
    out = [detokenizer.add_token(token) for token in ids]
    assert all("\ufffd" not in text for text in out)
    assert detokenizer.flush_text() == ""


def test_an_incomplete_character_is_flushed_as_one_replacement(
    byte_tokenizer: tokenizers.Tokenizer,
) -> None:
    tokenizer = byte_tokenizer
    pieces = create_token_pieces(tokenizer)
    assert pieces is not None
    ids = tokenizer.encode("z𓀀").ids[:-1]
    out = feed(IncrementalDetokenizer(pieces), ids)
    assert out == ["z", *[""] * (len(ids) - 1), "\ufffd"]


def test_ids_that_do_not_exist_say_nothing(known: tokenizers.Tokenizer) -> None:
    pieces = create_token_pieces(known)
    assert pieces is not None
    assert feed(IncrementalDetokenizer(pieces), [2**31 - 1, 999_999]) == ["", "", ""]


@_SETTINGS
@given(text=_TEXTS)
def test_window_equals_decode(byte_tokenizer: tokenizers.Tokenizer, text: str) -> None:
    """The fallback for unknown decoders, tested with a known one."""
    # To the fallback they look like an incomplete character, held too long.
    assume("\ufffd\ufffd" not in text)
    tokenizer = byte_tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    special = frozenset(
        index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )
    assert "".join(feed(WindowDetokenizer(tokenizer, special), ids)) == tokenizer.decode(ids)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(feed(WindowDetokenizer(tokenizer), ids)) == shown


def test_window_stays_short(byte_tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer = byte_tokenizer
    invalid = tokenizer.encode("🦊", add_special_tokens=False).ids[0]
    detokenizer = WindowDetokenizer(tokenizer)
    for _ in range(100):
        detokenizer.add_token(invalid)
        assert len(detokenizer._window) <= 20


def test_unknown_decoders_have_no_pieces() -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    assert create_token_pieces(tokenizer) is None
    tokenizer.decoder = decoders.WordPiece()
    assert create_token_pieces(tokenizer) is None


@pytest.mark.parametrize("continues", [False, True])
def test_prefix_space(continues: bool, known: tokenizers.Tokenizer) -> None:
    ids = known.encode(" hello", add_special_tokens=False).ids
    pieces = create_token_pieces(known)
    assert pieces is not None
    out = "".join(feed(IncrementalDetokenizer(pieces, continues=continues), ids))
    assert out.strip() == "hello"
    if not continues:
        assert out == known.decode(ids)
