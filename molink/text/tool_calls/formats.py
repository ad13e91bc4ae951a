"""Names of tool call formats, without the parsers."""

from typing import Literal, get_args

#: Tool call formats.
ToolCallFormat = Literal["hermes", "llama", "mistral", "harmony"]
#: Choices of the ``tool_call_parser`` setting; ``raw`` disables parsing.
ToolCallParserChoice = Literal["auto", "raw", "hermes", "llama", "mistral", "harmony"]
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = get_args(ToolCallFormat)
