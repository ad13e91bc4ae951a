"""Tokenizers from metadata alone: how texts are cut into words, merged by scores, and ended."""

import math
from array import array
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from molink.errors import BrokenModel
from molink.gguf.metadata import Metadata
from molink.gguf.tokens import TokenizerFiles, tokenizer_files

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXT = "I'M 12345 ok!!\n\n  x"


def made(**values: Any) -> tuple[TokenizerFiles, Tokenizer]:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    files = tokenizer_files(Metadata(metadata, "m.gguf"), 2048)
    return files, Tokenizer.from_str(files.tokenizer)


def byte_level(pre: str, **values: Any) -> tuple[TokenizerFiles, Tokenizer]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "he", "hel", "<|im_end|>", "<extra>", "hello"]
    kinds = array("i", [NORMAL] * 258 + [CONTROL, USER_DEFINED, NORMAL])
    merges = ["h e", "he l"]
    given = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}
    return made(**(given | values))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'", "M", " 12345", " ok", "!!", "\n\n ", " x"]),
        ("smollm", ["I", "'", "M", " ", "1", "2", "3", "4", "5", " ok", "!!", "\n\n ", " x"]),
        ("llama-bpe", ["I", "'M", " ", "123", "45", " ok", "!!\n\n", " ", " x"]),
        ("qwen2", ["I", "'M", " ", "1", "2", "3", "4", "5", " ok", "!!\n\n", " ", " x"]),
        ("tekken", ["I", "'M", " ", "1", "2", "3", "4", "5", " ok", "!!\n\n", " ", " x"]),
        ("default", ["I", "'", "M", " ", "123", "45", " ok", "!!", "\n\n ", " x"]),
    ],
)
def test_how_words_are_cut(pre: str, words: list[str]) -> None:
    _, tokenizer = byte_level(pre)
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in cut] == words


def test_merges_added_tokens_and_ends() -> None:
    files, tokenizer = byte_level("qwen2", eos_token_id=0, bos_token_id=1)
    assert tokenizer.encode("hel").ids == [257]
    assert tokenizer.encode("a<|im_end|>b<extra>").ids[1::2] == [258, 259]
    assert tokenizer.decode(tokenizer.encode("wörld <extra>").ids) == "wörld <extra>"
    # What usually ends an answer does, whatever the file names.
    assert files.ends == (0, 258)
    assert files.config["add_bos_token"] is False
    assert len(tokenizer.encode("hello").ids) > 1


def test_a_word_that_is_a_token_is_one_in_llama_3() -> None:
    files, tokenizer = byte_level("llama-bpe", bos_token_id=1)
    assert tokenizer.encode("hello").ids == [260]
    assert files.config["add_bos_token"] is True


def sentence_piece(**values: Any) -> tuple[TokenizerFiles, Tokenizer]:
    """Pieces of ``hello``; better ones have higher scores. Every byte is a token too."""
    pieces = {"▁": -9, "h": -9, "e": -9, "l": -9, "o": -9, "lo": -1, "ll": -2, "he": -3, "▁he": -4}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [float(score) for score in pieces.values()]
    given = {
        "model": "llama",
        "tokens": tokens,
        "token_type": array("i", kinds),
        "scores": array("f", scores),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return made(**(given | values))


def test_scores_say_what_is_merged_first() -> None:
    files, tokenizer = sentence_piece()
    texts = [tokenizer.id_to_token(index) for index in tokenizer.encode("hello hello").ids]
    assert texts == ["▁he", "l", "lo"] * 2
    ids = tokenizer.encode("é</s>").ids
    assert [tokenizer.id_to_token(index) for index in ids] == ["▁", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hello é").ids) == "hello é"
    assert (files.config["add_bos_token"], files.ends) == (True, (2,))


def test_no_space_before_a_text_where_the_file_says_so() -> None:
    _, tokenizer = sentence_piece(add_space_prefix=False)
    assert [tokenizer.id_to_token(index) for index in tokenizer.encode("he he").ids] == [
        "he",
        "▁he",
    ]


def test_scores_that_are_no_numbers() -> None:
    with pytest.raises(BrokenModel, match=r"scores has to be a list of 268 finite numbers"):
        sentence_piece(scores=array("f", [math.nan] * 268))
