"""A model as requests need it."""

from dataclasses import dataclass

from molink.text.tokenizer import Tokenizer
from molinkd.api.backend import ServedModel


@dataclass(frozen=True, slots=True)
class Offer:
    """A model and its tokenizer."""

    model: ServedModel
    tokenizer: Tokenizer
