"""Names of tool call formats, without the parsers."""

from typing import Literal, get_args

#: Tool call formats.
ToolCallFormat = Literal[
    "hermes",
    "llama",
    "mistral",
    "harmony",
    "qwen3_coder",
    "glm",
    "minimax_m2",
    "seed_oss",
    "deepseek",
    "kimi_k2",
    "granite",
    "phi4_mini",
    "pythonic",
    "lfm2",
    "gemma4",
]
#: Choices of the ``tool_call_parser`` setting; ``raw`` disables parsing.
ToolCallParserChoice = Literal["auto", "raw", ToolCallFormat]
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = get_args(ToolCallFormat)
