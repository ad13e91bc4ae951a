"""Parses calls between special tokens, with JSON arguments: DeepSeek V3, R1 and V3.1, Kimi K2.

DeepSeek V3: ``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, then the
arguments as a code block of JSON, ``<｜tool▁call▁end｜>``, further calls and
``<｜tool▁calls▁end｜>``. V3.1 writes ``name<｜tool▁sep｜>{…}`` between the inner two tokens, Kimi
K2 writes ``functions.name:0<|tool_call_argument_begin|>{…}`` between its own tokens.
"""

import re
from dataclasses import dataclass
from typing import Literal

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder
from molink.text.tool_calls.call_reader import JsonValueScanner

#: Maximum characters between the token that begins a call and its arguments.
_MAX_HEADER = 512
#: Maximum characters held around calls: white space and a fence.
_MAX_GAP = 256


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Tokens of a format: around all calls, around each, and before its arguments.

    ``header`` matches the text between the beginning of a call and its arguments; its group is the
    name. ``fence`` may follow the arguments.
    """

    open: str
    close: str
    begin: str
    end: str
    separator: str
    header: re.Pattern[str]
    fence: str = ""

    @property
    def markers(self) -> frozenset[str]:
        """All tokens."""
        return frozenset({self.open, self.close, self.begin, self.end, self.separator})


DEEPSEEK = CallTokens(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    re.compile(r"\s*(?:function<｜tool▁sep｜>)?([\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"),
    "```",
)
KIMI = CallTokens(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"),
)


class MarkedCallParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, names: frozenset[str], tokens: CallTokens) -> None:
        self._names, self._tokens = names, tokens
        self._parts = AnswerPartBuilder()
        self._finder = MarkerFinder((tokens.open, tokens.close, tokens.begin, tokens.end))
        self._value = JsonValueScanner()
        #: ``head`` follows the token that begins a call, ``tail`` its arguments.
        self._state: Literal["outside", "head", "arguments", "tail"] = "outside"
        #: The token that opens all calls and white space; text if no call follows.
        self._opening = ""
        #: The following text of a call; content if it is not a call.
        self._held = ""
        #: Tokens that belong to the preceding calls.
        self._awaited: set[str] = set()

    def parse_delta(self, text: str) -> list[AnswerPart]:
        pos = 0
        while pos < len(text):
            match self._state:
                case "outside":
                    pos = self._read_content(text, pos)
                case "head":
                    pos = self._read_header(text, pos)
                case "arguments":
                    pos = self._read_arguments(text, pos)
                case "tail":
                    pos = self._read_tail(text, pos)
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        if self._state == "head":
            self._abandon_call()
        elif self._state == "tail":
            self._end_tail()
        self._add_content(self._finder.flush_text())
        self._parts.add_text(self._opening)
        return self._parts.finish_parts()

    def _read_content(self, text: str, pos: int) -> int:
        before, marker, pos = self._finder.find_marker(text, pos)
        self._add_content(before)
        if marker == self._tokens.begin:
            self._held, self._state = marker, "head"
        elif marker in self._awaited:
            self._awaited.discard(marker)
        elif marker is not None:
            self._parts.add_text(self._opening)
            self._opening = marker if marker == self._tokens.open else ""
            if not self._opening:
                self._parts.add_text(marker)
        return pos

    def _add_content(self, text: str) -> None:
        """Add content; white space after an opening token is held with it."""
        if self._opening and not text.strip() and len(self._opening) + len(text) <= _MAX_GAP:
            self._opening += text
        elif text:
            self._parts.add_text(self._opening + text)
            self._opening = ""

    def _read_header(self, text: str, pos: int) -> int:
        char = text[pos]
        if char == "{":
            found = self._tokens.header.fullmatch(self._held, len(self._tokens.begin))
            if found is not None and found[1] in self._names:
                self._parts.begin_call(found[1])
                self._value, self._state = JsonValueScanner(), "arguments"
                self._opening = self._held = ""
                return pos
        if char == "{" or len(self._held) >= _MAX_HEADER:
            self._abandon_call()
            return pos
        self._held += char
        return pos + 1

    def _abandon_call(self) -> None:
        self._parts.add_text(self._opening + self._held)
        self._opening, self._held, self._state = "", "", "outside"

    def _read_arguments(self, text: str, pos: int) -> int:
        end, ended = self._value.scan_text(text, pos)
        self._parts.add_arguments(text[pos:end])
        if ended:
            self._parts.end_call()
            self._awaited = {self._tokens.end, self._tokens.close}
            self._state = "tail"
        return end

    def _read_tail(self, text: str, pos: int) -> int:
        """Read white space and a fence after arguments."""
        char = text[pos]
        if len(self._held) < _MAX_GAP and (char.isspace() or char in self._tokens.fence):
            self._held += char
            return pos + 1
        self._end_tail()
        return pos

    def _end_tail(self) -> None:
        rest = self._held
        if self._tokens.fence and rest.lstrip().startswith(self._tokens.fence):
            rest = rest.lstrip().removeprefix(self._tokens.fence)
        self._parts.add_text(rest)
        self._held, self._state = "", "outside"
