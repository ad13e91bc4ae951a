"""A model as requests need it."""

from dataclasses import dataclass

from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.create import ToolCallParserChoice
from molinkd.api.backend import ServedModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and how its answers are to be read."""

    model: ServedModel
    tokenizer: Tokenizer
    tool_call_parser: ToolCallParserChoice = "auto"
