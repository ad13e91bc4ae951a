"""Breaks the lines of a text that comes in pieces."""

import unicodedata

from rich.cells import cell_len

_FENCE = "```"


class WordWrapper:
    """Breaks lines between words, and before characters of two columns such as Chinese ones.

    A word is held back until it ends. Blocks of code stay as they are, as does a word that is
    longer than a line. Sans-IO.
    """

    def __init__(self, width: int) -> None:
        """``width`` is a line's, in columns."""
        self._width = width
        self._column = 0
        self._spaces = self._word = ""
        #: The beginning of the line, which tells a fence from text.
        self._line = ""
        self._is_code = False

    def wrap(self, text: str) -> str:
        """Add a piece; return what can be printed."""
        return "".join(map(self._add, text))

    def flush(self) -> str:
        """Return what has been held back."""
        held = self._spaces if not self._word else self._end_word()
        self._spaces = ""
        return held

    def _add(self, char: str) -> str:
        if char == "\n":
            return self._end_line()
        if len(self._line.lstrip()) < len(_FENCE):
            self._line += char
        if self._is_code:
            return char
        if char.isspace():
            ended = self._end_word()
            self._spaces += char
            return ended
        begins = self._word != "" and _may_begin_line(char)
        ended = self._end_word() if begins else ""
        self._word += char
        return ended

    def _end_word(self) -> str:
        if not self._word:
            return ""
        spaces, word = self._spaces, self._word
        self._spaces = self._word = ""
        if self._column and self._column + cell_len(spaces + word) > self._width:
            self._column = cell_len(word)
            return f"\n{word}"
        self._column += cell_len(spaces + word)
        return spaces + word

    def _end_line(self) -> str:
        ended = self._end_word()
        if self._line.lstrip().startswith(_FENCE):
            self._is_code = not self._is_code
        self._column, self._spaces, self._line = 0, "", ""
        return f"{ended}\n"


def _may_begin_line(char: str) -> bool:
    """Whether a line may be broken before a character that no space precedes."""
    return cell_len(char) == 2 and not unicodedata.category(char).startswith("P")
