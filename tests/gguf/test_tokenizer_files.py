"""Tokenizers built from metadata alone: pre-tokenization, merges by score, and end tokens."""

import itertools
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from molink.errors import BrokenModel
from molink.gguf.metadata import GgufMetadata
from molink.gguf.tokenizer_files import TokenizerFiles, build_tokenizer_files

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXT = "I'M 12345 ok!!\n\n  x"


def made(*templates: str, **values: Any) -> tuple[TokenizerFiles, Tokenizer]:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    metadata |= {f"tokenizer.chat_template{name}": f"of{name}" for name in templates}
    files = build_tokenizer_files(GgufMetadata(metadata, "m.gguf"), 2048)
    return files, Tokenizer.from_str(files.tokenizer)


def byte_level(pre: str, *templates: str, **values: Any) -> tuple[TokenizerFiles, Tokenizer]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "he", "hel", "<|im_end|>", "<extra>", "hello"]
    kinds = array("i", [NORMAL] * 258 + [CONTROL, USER_DEFINED, NORMAL])
    merges = ["h e", "he l"]
    given = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}
    return made(*templates, **(given | values))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'", "M", " 12345", " ok", "!!", "\n\n ", " x"]),
        ("smollm", ["I", "'", "M", " ", "1", "2", "3", "4", "5", " ok", "!!", "\n\n ", " x"]),
        ("llama-bpe", ["I", "'M", " ", "123", "45", " ok", "!!\n\n", " ", " x"]),
        ("qwen2", ["I", "'M", " ", "1", "2", "3", "4", "5", " ok", "!!\n\n", " ", " x"]),
        ("glm4", ["I", "'M", " ", "123", "45", " ok", "!!\n\n", " ", " x"]),
        ("tekken", ["I", "'M", " ", "1", "2", "3", "4", "5", " ok", "!!\n\n", " ", " x"]),
        ("exaone4", ["I", "'", "M", " 12345", " ok", "!!", "\n\n ", " x"]),
        ("minimax-m2", ["I'M", " ", "123", "45", " ok", "!!\n\n", " ", " x"]),
        (
            "seed-coder",
            ["I", "'M", " ", "1", "2", "3", "4", "5", " ok", "!!", "\n\n", " ", " x"],
        ),
        ("deepseek-v3", ["I", "'M", " ", "123", "45", " ok", "!!\n\n", " ", " x"]),
        ("hunyuan-dense", ["I", "'M", " ", "123", "45", " ok", "!!\n\n", " ", " x"]),
        ("default", ["I", "'", "M", " ", "123", "45", " ok", "!!", "\n\n ", " x"]),
    ],
)
def test_how_words_are_cut(pre: str, words: list[str]) -> None:
    _, tokenizer = byte_level(pre)
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in cut] == words


def test_merges_that_crash_the_tokenizers_library() -> None:
    """A merge result is longer than its halves; the tokenizers library panics there."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = [*letters, "he", " "], ["he l", "h e", "  "]
    with pytest.raises(BrokenModel, match="its tokenizer can't be created"):
        made(model="gpt2", pre="gpt-2", tokens=tokens, merges=merges)


def test_a_template_for_tools() -> None:
    assert byte_level("qwen2", "")[0].config["chat_template"] == "of"
    assert byte_level("qwen2", "", ".tool_use")[0].config["chat_template"] == [
        {"name": "default", "template": "of"},
        {"name": "tool_use", "template": "of.tool_use"},
    ]


def test_merges_added_tokens_and_ends() -> None:
    files, tokenizer = byte_level("qwen2", eos_token_id=0, bos_token_id=1)
    assert tokenizer.encode("hel").ids == [257]
    assert tokenizer.encode("a<|im_end|>b<extra>").ids[1::2] == [258, 259]
    assert tokenizer.decode(tokenizer.encode("wörld <extra>").ids) == "wörld <extra>"
    # Tokens that usually end an answer do so, regardless of the end token that the file names.
    assert files.eos_ids == (0, 258)
    assert files.config["add_bos_token"] is False
    assert len(tokenizer.encode("hello").ids) > 1


def test_a_word_that_is_a_token_is_one_in_llama_3() -> None:
    files, tokenizer = byte_level("llama-bpe", bos_token_id=1)
    assert tokenizer.encode("hello").ids == [260]
    assert files.config["add_bos_token"] is True


def test_a_word_that_is_a_token_is_one_in_glm_4_but_no_bos_is_before_it() -> None:
    files, tokenizer = byte_level("glm4", bos_token_id=1)
    assert tokenizer.encode("hello").ids == [260]
    assert files.config["add_bos_token"] is False
    files, tokenizer = byte_level("chatglm-bpe", bos_token_id=1)
    assert len(tokenizer.encode("hello").ids) > 1
    assert files.config["add_bos_token"] is False


#: Metadata that llama.cpp's converter writes for released models of supported architectures.
RELEASED = {
    "llama": ("llama-bpe", "smaug-bpe", "tekken", "smollm", "deepseek-coder", "falcon3", "mellum"),
    "qwen2": ("qwen2", "deepseek-r1-qwen", "a.x-4.0"),
    "phi3": ("dbrx", "gpt-4o"),
    "llama4": ("llama4",),
    "granite": ("refact",),
    "olmo2": ("dbrx",),
    "glm4": ("glm4", "chatglm-bpe"),
}


@pytest.mark.parametrize("pre", sorted({name for names in RELEASED.values() for name in names}))
def test_words_of_released_files_are_known(pre: str) -> None:
    _, tokenizer = byte_level(pre)
    assert tokenizer.decode(tokenizer.encode("wörld 12 hel").ids) == "wörld 12 hel"


def sentence_piece(**values: Any) -> tuple[TokenizerFiles, Tokenizer]:
    """Pieces of ``hello``, of which better ones have higher scores. Every byte is also a token."""
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
    assert (files.config["add_bos_token"], files.eos_ids) == (True, (2,))


def test_no_space_before_a_text_where_the_file_says_so() -> None:
    _, tokenizer = sentence_piece(add_space_prefix=False)
    assert [tokenizer.id_to_token(index) for index in tokenizer.encode("he he").ids] == [
        "he",
        "▁he",
    ]


def test_scores_that_are_no_numbers() -> None:
    with pytest.raises(BrokenModel, match=r"scores must be a list of 268 finite numbers"):
        sentence_piece(scores=array("f", [math.nan] * 268))


def test_tokens_that_are_merged_in_more_ways_than_there_is_room() -> None:
    tokens = ["<unk>", *("x" * length for length in range(1, 200))]
    scores = array("f", [0.0] * len(tokens))
    with pytest.raises(BrokenModel, match=r"tokenizer\.ggml\.tokens .* in too many ways"):
        made(model="llama", tokens=tokens, scores=scores)


# --- Gemma -----------------------------------------------------------------------------------

PROSE = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SPACES, LINES, TABS = ("▁▁", "▁▁▁", "▁▁▁▁"), ("\n\n", "\n\n\n"), ("\t\t", "\t\t\t")
TURNS = ("<start_of_turn>", "<end_of_turn>")
WHOLE = (*SPACES, *LINES, *TABS, "<table>")


def learned() -> list[str]:
    """Letters and what a BPE merges of them in PROSE, the first merged first; no tabs."""
    words = pre_tokenizers.Split("▁", "merged_with_next")
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = words
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    lines = [line.replace(" ", "▁") for line in PROSE.splitlines()]
    learner.train_from_iterator(["\n", *lines], trainer)
    found = learner.get_vocab()
    return sorted(found, key=lambda text: found[text])


def gemma_metadata(pieces: Sequence[str], written: str) -> dict[str, Any]:
    """As today's converter writes it (``now``), with ▁ for spaces, or with runs as plain tokens."""
    as_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    head = ["<pad>", "<eos>", "<bos>", "<unk>", *TURNS]
    tokens = [*head, *WHOLE, *as_bytes, *pieces]
    special = NORMAL if written == "plain" else CONTROL
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, special]
    kinds += [NORMAL if written == "plain" else USER_DEFINED] * (len(WHOLE) - 1) + [USER_DEFINED]
    kinds += [BYTE] * 256 + [NORMAL] * len(pieces)
    least = 0.0 if written == "plain" else -1000.0
    scores = [least] * len(head) + [least] * len(WHOLE) + [0.0] * 256
    scores += [-float(rank) for rank in range(len(pieces))]
    if written == "now":
        tokens = [text.replace("▁", " ") if text in SPACES else text for text in tokens]
    ids = {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": array("i", kinds),
        "scores": array("f", scores),
        "add_space_prefix": False,
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "unknown_token_id": ids["unk"],
    }


def their_gemma(pieces: Sequence[str]) -> Any:
    """The same vocabulary, as transformers converts it from Gemma's SentencePiece model."""
    from transformers import GemmaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    given = gemma_metadata(pieces, "plain")
    vocabulary = {text: index for index, text in enumerate(given["tokens"])}
    vocabulary["\t"] = vocabulary.pop("<0x09>")
    scores = dict(zip(given["tokens"], given["scores"], strict=True)) | {"\t": 0.0}
    theirs = GemmaTokenizer(vocabulary, generate_merges(vocabulary, scores))
    theirs.add_tokens([AddedToken(text, special=True) for text in TURNS])
    whole = [AddedToken(text, normalized=False) for text in WHOLE if text not in SPACES]
    theirs.add_tokens(whole)
    return theirs


TEXTS = (
    PROSE,
    *PROSE.split("\n"),
    *map("".join, itertools.permutations(("  ", "a b", "\t\t", "\n\n\n\n", "<table>é 12\t"), 4)),
    "<start_of_turn>user\nHello   you\t\t\t\t.<end_of_turn>\n      日本\r\n",
)


@pytest.mark.parametrize("written", ["now", "plain"])
def test_gemmas_vocabulary_cuts_as_transformers_does(written: str) -> None:
    pieces = learned()
    files, ours = made(**gemma_metadata(pieces, written))
    theirs = their_gemma(pieces)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        expected = theirs.encode(text, add_special_tokens=False)
        assert ids == expected
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert files.eos_ids == (1, 5)
    assert files.config["add_bos_token"] is True


def test_runs_of_spaces_as_older_files_have_them() -> None:
    """Runs of ``▁`` are looked up as written; runs of spaces become them by merges."""
    _, ours = made(**gemma_metadata(learned(), "before"))
    tokens = [ours.id_to_token(index) for index in ours.encode(". ▁▁▁.  .").ids]
    assert tokens == [".", "▁", "▁▁▁", ".", "▁▁", "."]
