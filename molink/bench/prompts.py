"""Prompts of about so many tokens, made of plain words.

Without the model's tokenizer the number of tokens is learnt from the server: two probes of known
length give the tokens per word and what the chat template adds.
"""

import random
from dataclasses import dataclass

_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education"
)
#: Words that any English tokenizer knows, one token each in most.
WORDS = tuple(_WORD_LIST.split())

#: Words in the two probes.
SHORT_PROBE = 8
LONG_PROBE = 72


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tokens of a prompt as a function of its words. The default suits a large vocabulary."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def from_probes(cls, short_tokens: int, long_tokens: int) -> "Calibration":
        """From the server's counts for prompts of :data:`SHORT_PROBE` and :data:`LONG_PROBE`."""
        slope = (long_tokens - short_tokens) / (LONG_PROBE - SHORT_PROBE)
        if slope <= 0:
            return cls()
        return cls(slope, max(0.0, short_tokens - slope * SHORT_PROBE))

    def words_for_tokens(self, tokens: int) -> int:
        """How many words make a prompt of about ``tokens`` tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


def make_prompt(words: int, seed: int) -> str:
    """``words`` words drawn by ``seed``; prompts of different seeds differ from the start on."""
    source = random.Random(seed)
    return " ".join(source.choices(WORDS, k=words))
