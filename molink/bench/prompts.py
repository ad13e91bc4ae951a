"""Prompts of a given approximate token count, made of common words.

The tokenizer is unknown here. Two probes of known length measure the tokens per word and the
overhead of the chat template.
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
#: Words that are one token each in most English tokenizers.
WORDS = tuple(_WORD_LIST.split())

#: Number of words in the two probes.
SHORT_PROBE = 8
LONG_PROBE = 72


@dataclass(frozen=True, slots=True)
class Calibration:
    """A linear model of a prompt's tokens by its words. The default suits a large vocabulary."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def from_probes(cls, short_tokens: int, long_tokens: int) -> "Calibration":
        """Fit to the server's token counts of the short and the long probe."""
        slope = (long_tokens - short_tokens) / (LONG_PROBE - SHORT_PROBE)
        if slope <= 0:
            return cls()
        return cls(slope, max(0.0, short_tokens - slope * SHORT_PROBE))

    def words_for_tokens(self, tokens: int) -> int:
        """Return the number of words in a prompt of about ``tokens`` tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


def make_prompt(words: int, seed: int) -> str:
    """Draw ``words`` words by ``seed``. Prompts of different seeds share no prefix."""
    source = random.Random(seed)
    return " ".join(source.choices(WORDS, k=words))
