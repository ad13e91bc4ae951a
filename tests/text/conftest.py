"""Small tokenizers of the kinds that models use, trained or built by the tests."""

from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "the quick brown fox says hello world",
    "naïve façade, 你好世界, Привет мир",
    "🦊 👩‍💻 e\u0301",
]


def byte_level() -> tokenizers.Tokenizer:
    """The kind of GPT-2, Llama 3 and Qwen."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool é>", special=False), AddedToken("Ġraw", special=False)])
    return tokenizer


def _byte_fallback_vocab() -> list[tuple[str, float]]:
    words = ["▁", "▁the", "▁hello", "th", "o", "e", "l", "h", "▁fox", "你", "▁▁", "▁world", "!"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    return pieces + [(word, -float(rank + 2)) for rank, word in enumerate(words)]


def unigram_llama() -> tokenizers.Tokenizer:
    """The kind of Llama 2 and Mistral: byte fallback, and a leading space that is stripped."""
    tokenizer = tokenizers.Tokenizer(models.Unigram(_byte_fallback_vocab(), 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def unigram_gemma() -> tokenizers.Tokenizer:
    """Byte fallback, and nothing at the beginning."""
    tokenizer = tokenizers.Tokenizer(models.Unigram(_byte_fallback_vocab(), 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Plain SentencePiece: ``▁`` before words; unknown characters are lost."""
    vocabulary = [piece for piece in _byte_fallback_vocab() if not piece[0].startswith("<0x")]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


KNOWN = (byte_level, unigram_llama, unigram_gemma, metaspace)


@pytest.fixture(scope="module", params=KNOWN, ids=lambda make: make.__name__)
def known(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    """One tokenizer of each kind with a known decoder."""
    make: Callable[[], tokenizers.Tokenizer] = request.param
    return make()


@pytest.fixture(scope="session")
def byte_tokenizer() -> tokenizers.Tokenizer:
    """The byte-level one."""
    return byte_level()
