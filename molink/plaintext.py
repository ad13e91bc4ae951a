"""Text of other peers on its way to a terminal or a log: nothing in it may be obeyed.

A name or a reason that a peer sends could hold escape sequences that rewrite the screen, line
breaks that fake a log entry, or marks that turn the direction of writing.
"""

import copy
import logging
import re
import unicodedata

#: Control characters, line and paragraph separators, marks of direction, halves of characters.
_ALLOWED_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: Characters of a text from elsewhere that a screen shows.
_MAX_LENGTH = 400
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def printable(text: str, keep: str = "") -> str:
    r"""``text`` with what a terminal would obey written out (``\x1b``), but for ``keep``."""

    def written_out(match: re.Match[str]) -> str:
        found = match[0]
        return found if found in keep else found.encode("unicode_escape").decode("ascii")

    return _ALLOWED_CONTROLS.sub(written_out, text)


def sanitize_text(text: str) -> str:
    """The beginning of a text of somebody else, without anything that is obeyed or not seen."""
    return printable("".join(c for c in text[:_MAX_LENGTH] if unicodedata.category(c) != "Cf"))


class LogFormatter(logging.Formatter):
    """A record as one line of plain text; only a traceback takes more."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        record = copy.copy(record)
        record.msg, record.args = printable(record.getMessage()), ()
        return printable(super().format(record), keep="\n\t")
