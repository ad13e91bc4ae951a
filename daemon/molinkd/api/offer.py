"""A model as requests need it."""

from dataclasses import dataclass

from molink.text.calls.create import FormatChoice
from molink.text.tokenizer import Tokenizer
from molinkd.api.backend import ServedModel


@dataclass(frozen=True, slots=True)
class Offer:
    """A model, its tokenizer, and how its answers are to be read."""

    model: ServedModel
    tokenizer: Tokenizer
    answer_format: FormatChoice = "auto"
