"""A model as requests need it."""

from dataclasses import dataclass

from molink.text.calls.create import ToolCallParserChoice
from molink.text.tokenizer import Tokenizer
from molinkd.api.backend import ServedModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and how its answers are to be read."""

    model: ServedModel
    tokenizer: Tokenizer
    tool_call_parser: ToolCallParserChoice = "auto"
