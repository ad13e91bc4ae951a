"""Prompts of models that fill a gap between two texts (fill in the middle)."""

from collections.abc import Sequence

from molink.text.tokenizer import Tokenizer

#: How families mark what is before the gap, what is after it, and where the answer begins; all in
#: this order. Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", §3.
_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


def build_fim_prompt(
    tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]
) -> list[int] | None:
    """The prompt for what is between two texts; ``None`` if the model has no marks for them."""
    for marks in _FIM_TOKENS:
        found = [tokenizer.find_token_id(mark) for mark in marks]
        if None not in found:
            prefix, suffix, middle = (one for one in found if one is not None)
            begin = [token for token in tokenizer.encode("") if token == tokenizer.bos_id]
            return [*begin, prefix, *before, suffix, *after, middle]
    return None
