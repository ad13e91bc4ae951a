"""Converts a GGUF file's tokenizer to ``tokenizer.json``.

Two kinds are supported: byte-level BPE with merges (``gpt2``), whose pre-tokenizer has a name
(``tokenizer.ggml.pre``), and SentencePiece BPE (``llama``), which has scores instead of merges.
Regular expressions are llama.cpp's, so that token ids are equal.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from molink.errors import BrokenModel, UnsupportedModel
from molink.gguf.metadata import GgufMetadata
from molink.native import raise_as

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_MAX_TOKENS = 2**21
#: Maximum characters of a token; known ones have at most 256.
_MAX_TOKEN = 1024
#: Overhead of a merge or token in characters, and the limit of all merges' size relative to that of
#: all tokens (Llama 2 has 1.9, Aquila 1.8).
_OWN, _MERGES_ROOM = 16, 16
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"
#: The byte token of an ASCII character.
_ASCII = re.compile(r"<0x([0-7][0-9A-Fa-f])>")

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = rf"{_CONTRACTIONS}?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
#: Pre-tokenizers: each expression splits what the previous one left.
_SPLIT_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "a.x-4.0", "mellum", "exaone4"),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"),
            *("pixtral", "midm-2.0", "lfm2"),
        ),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo"), (_QWEN2,)
    ),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT4O,)),
    "seed-coder": (_SEED,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
}
#: Pre-tokenizers that add BOS unless the file says otherwise.
_BOS_TOKENIZERS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"),
    "lfm2",
)
#: Pre-tokenizers that ignore merges for words that are tokens.
_WHOLE_WORD_TOKENIZERS = (*_BOS_TOKENIZERS, "glm4")
#: Tokens that always end an answer.
_END_TOKENS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
    | {"<|eom_id|>", "<EOT>", "<｜end▁of▁sentence｜>"}
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """``tokenizer.json``, ``tokenizer_config.json``, and the end-of-sequence ids."""

    tokenizer: str
    config: dict[str, Any]
    eos_ids: tuple[int, ...]


def build_tokenizer_files(
    metadata: GgufMetadata, vocabulary: int, *, embeds: bool = False
) -> TokenizerFiles:
    """Build the tokenizer of a model with ``vocabulary`` embedding rows.

    If the model ``embeds``, texts end with the end-of-sequence token if the file sets it.

    Raises:
        UnsupportedModel: the tokenizer's kind is not implemented.
        BrokenModel: it is inconsistent, or does not fit the embedding.
    """
    tokens = _read_tokens(metadata, vocabulary)
    kinds = _read_token_types(metadata, tokens)
    model = metadata.get_string("tokenizer.ggml.model")
    where = metadata.where
    with raise_as(lambda reason: BrokenModel(f"{where}: its tokenizer can't be created: {reason}")):
        if model == "gpt2":
            made = _byte_level_model(metadata, tokens)
        elif model == "llama":
            made = _sentence_piece_model(metadata, tokens, kinds)
        else:
            raise UnsupportedModel(
                f"{where}: tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are)"
            )
        made.add_tokens(_find_added_tokens(metadata, tokens, kinds))
        if embeds and metadata.get_boolean("tokenizer.ggml.add_eos_token", False):
            _append_eos(made, metadata, tokens)
        source = made.to_str()
    return TokenizerFiles(
        source, _build_config(metadata, tokens, model), _find_eos_ids(metadata, tokens)
    )


def _read_tokens(metadata: GgufMetadata, vocabulary: int) -> list[str]:
    key = "tokenizer.ggml.tokens"
    tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(metadata.get_strings(key))]
    if not 0 < len(tokens) <= min(vocabulary, _MAX_TOKENS):
        raise BrokenModel(
            f"{metadata.where}: metadata {key} has {len(tokens)} tokens, but the embedding "
            f"{vocabulary} rows"
        )
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN:
        raise BrokenModel(f"{metadata.where}: metadata {key} has a token of {longest} characters")
    if len(set(tokens)) < len(tokens):
        counts = Counter(tokens)
        twice = next(text for text in tokens if counts[text] > 1)
        raise BrokenModel(f"{metadata.where}: metadata {key} has {twice[:80]!r} twice")
    return tokens


def _read_token_types(metadata: GgufMetadata, tokens: Sequence[str]) -> list[int]:
    """Return token types; usual end tokens are always control tokens."""
    key, count = "tokenizer.ggml.token_type", len(tokens)
    found = metadata.get_numbers(key, count) if key in metadata else [_NORMAL] * count
    return [
        _CONTROL if text in _END_TOKENS else int(kind)
        for text, kind in zip(tokens, found, strict=True)
    ]


def _byte_level_model(metadata: GgufMetadata, tokens: Sequence[str]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    named = metadata.get_string("tokenizer.ggml.pre", "default")
    if named not in _SPLIT_PATTERNS:
        raise UnsupportedModel(
            f"{metadata.where}: tokenizer.ggml.pre {named!r} is not supported (only "
            f"{', '.join(sorted(_SPLIT_PATTERNS))})"
        )
    merges = [
        _split_merge(metadata, line) for line in metadata.get_strings("tokenizer.ggml.merges")
    ]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=named in _WHOLE_WORD_TOKENIZERS))
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _SPLIT_PATTERNS[named]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    made.decoder = decoders.ByteLevel()
    return made


def _split_merge(metadata: GgufMetadata, line: str) -> tuple[str, str]:
    cut = line.find(" ", 1)
    if cut < 0:
        raise BrokenModel(
            f"{metadata.where}: metadata tokenizer.ggml.merges has {line[:80]!r}, which is not a "
            "pair"
        )
    return line[:cut], line[cut + 1 :]


def _sentence_piece_model(
    metadata: GgufMetadata, tokens: Sequence[str], kinds: Sequence[int]
) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = metadata.get_index("tokenizer.ggml.unknown_token_id") or 0
    if unknown >= len(tokens):
        raise _missing_token_error(metadata, "unknown", unknown)
    scores = metadata.get_numbers("tokenizer.ggml.scores", len(tokens))
    texts = _with_bytes_as_characters(tokens, kinds)
    model = models.BPE(
        {text: index for index, text in enumerate(texts)},
        _build_merges(metadata, texts, kinds, scores),
        unk_token=texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    made = Tokenizer(model)
    prefixed = metadata.get_boolean("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [normalizers.Prepend(_SPACE), spaces] if prefixed else [spaces]
    made.normalizer = normalizers.Sequence(steps)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    stripped = [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.decoder = decoders.Sequence([*back, *stripped])
    return made


def _with_bytes_as_characters(tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Replace byte tokens by their characters, such as the tab, if these have no token.

    Merges would not find them otherwise.
    """
    known = set(tokens)
    found = list(tokens)
    for index, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        match = _ASCII.fullmatch(text) if kind == _BYTE else None
        if match is not None and chr(int(match[1], 16)) not in known:
            found[index] = chr(int(match[1], 16))
            known.add(found[index])
    return found


def _build_merges(
    metadata: GgufMetadata, tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Build merges equivalent to SentencePiece scores: the best possible merge comes first."""
    token_scores = {
        text: score
        for text, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED, _BYTE)
    }
    order = {text: index for index, text in enumerate(tokens)}
    room = _MERGES_ROOM * sum(len(text) + _OWN for text in tokens)
    found: list[tuple[float, str, str]] = []
    for text, score in token_scores.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in token_scores and right in token_scores:
                # Refer to the tokens themselves: concatenations of untrusted ones may be long.
                found.append((score, tokens[order[left]], tokens[order[right]]))
                room -= len(text) + _OWN
        if room < 0:
            raise BrokenModel(
                f"{metadata.where}: metadata tokenizer.ggml.tokens has tokens that are merged in "
                f"too many ways (over {len(found)})"
            )
    found.sort(key=lambda each: (-each[0], -len(each[1]), order[each[1]]))
    return [(left, right) for _, left, right in found]


def _append_eos(made: "Tokenizer", metadata: GgufMetadata, tokens: Sequence[str]) -> None:
    from tokenizers import processors

    end = metadata.get_index("tokenizer.ggml.eos_token_id")
    if end is None or end >= len(tokens):
        raise _missing_token_error(metadata, "eos", end or 0)
    # The template can't call the token by its text, which may contain a colon.
    named = {"id": "end", "ids": [end], "tokens": [tokens[end]]}
    made.post_processor = processors.TemplateProcessing(single="$A end", special_tokens=[named])


def _find_added_tokens(
    metadata: GgufMetadata, tokens: Sequence[str], kinds: Sequence[int]
) -> "list[AddedToken]":
    """Tokens that are split off before pre-tokenization."""
    from tokenizers import AddedToken

    name = metadata.get_string("general.name", "").lower()
    strips = "phi-3" in name or "phi3" in name
    plain = ("<unk>", "<s>", "<|endoftext|>")
    return [
        AddedToken(
            text,
            special=kind in (_CONTROL, _UNKNOWN),
            normalized=False,
            rstrip=strips and text not in plain,
        )
        for text, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    ]


def _build_config(metadata: GgufMetadata, tokens: Sequence[str], model: str) -> dict[str, Any]:
    named = metadata.get_string("tokenizer.ggml.pre", "default")
    adds = model == "llama" or named in _BOS_TOKENIZERS
    config: dict[str, Any] = {
        "add_bos_token": metadata.get_boolean("tokenizer.ggml.add_bos_token", adds)
    }
    for key, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = metadata.get_index(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if index >= len(tokens):
            raise _missing_token_error(metadata, key, index)
        config[f"{ours}_token"] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata.get_string("tokenizer.chat_template")
    if "tokenizer.chat_template.tool_use" in metadata:
        tool_use = metadata.get_string("tokenizer.chat_template.tool_use")
        config["chat_template"] = [
            {"name": "default", "template": config.get("chat_template")},
            {"name": "tool_use", "template": tool_use},
        ]
    if config["add_bos_token"] and "bos_token" not in config:
        config["add_bos_token"] = False
    return config


def _find_eos_ids(metadata: GgufMetadata, tokens: Sequence[str]) -> tuple[int, ...]:
    named = [metadata.get_index(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    usual = [index for index, text in enumerate(tokens) if text in _END_TOKENS]
    found = dict.fromkeys([*(index for index in named if index is not None), *usual])
    return tuple(index for index in found if index < len(tokens))


def _missing_token_error(metadata: GgufMetadata, key: str, index: int) -> BrokenModel:
    return BrokenModel(
        f"{metadata.where}: metadata tokenizer.ggml.{key}_token_id is {index}, but there is no "
        "such token"
    )
