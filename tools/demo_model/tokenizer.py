"""The tokenizer: byte-level BPE, digits one by one, and a ChatML-like template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2
import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.corpus import Conversation

VOCABULARY = 2048
TURN_START, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

#: Written so that a conversation without a system message costs no tokens for one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: Qwen2's split: single digits make sums learnable, words keep the space before them.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def render_text(conversation: Sequence[object], *, ask: bool = False) -> str:
    """The conversation as text; `ask` opens the assistant's turn at its end."""
    template = jinja2.Template(CHAT_TEMPLATE)
    text: str = template.render(messages=conversation, add_generation_prompt=ask)
    return text


def train_tokenizer(conversations: Iterable[Conversation]) -> Tokenizer:
    """A byte-level BPE of exactly `VOCABULARY` entries."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[TEXT_END, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{turn['role']}\n{turn['content']}" for talk in conversations for turn in talk)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two tokenizer files of the Hugging Face layout."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": TEXT_END,
        "unk_token": None,
        "additional_special_tokens": [TURN_START],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a written model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_conversations(
    tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> list[NDArray[np.int64]]:
    """Token ids of each conversation."""
    template = jinja2.Template(CHAT_TEMPLATE)
    texts = [template.render(messages=talk) for talk in conversations]
    return [np.array(found.ids, dtype=np.int64) for found in tokenizer.encode_batch(texts)]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary is known to have."""
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, f"{token} is not in the vocabulary"
    return found


def mark_answers(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which tokens the assistant wrote: its answers and the mark that ends each."""
    start, end = token_id(tokenizer, TURN_START), token_id(tokenizer, TURN_END)
    header = tokenizer.encode(f"{TURN_START}assistant\n").ids
    mask = np.zeros(len(ids), dtype=np.bool_)
    ends = np.flatnonzero(ids == end)
    for first in np.flatnonzero(ids == start):
        body = first + len(header)
        if list(ids[first:body]) == header:
            mask[body : ends[np.searchsorted(ends, first)] + 1] = True
    return mask
