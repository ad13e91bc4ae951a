"""A served model with its tokenizer."""

from dataclasses import dataclass

from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.create import ToolCallParserChoice
from molinkd.api.backend import ServedModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and the parser of its answers."""

    model: ServedModel
    tokenizer: Tokenizer
    tool_call_parser: ToolCallParserChoice = "auto"
