"""Makes text from other peers safe for terminals and logs.

A name or reason from a peer could hold escape sequences that rewrite the screen, line breaks that
fake a log entry, or marks that change the writing direction.
"""

import copy
import logging
import re
import unicodedata

#: Control characters, line and paragraph separators, direction marks, surrogates.
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: Maximum number of characters shown of a peer's text.
_MAX_LENGTH = 400
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters in ``text`` (``\x1b``), except those in ``keep``."""

    def written_out(match: re.Match[str]) -> str:
        found = match[0]
        return found if found in keep else found.encode("unicode_escape").decode("ascii")

    return _CONTROL_CHARACTERS.sub(written_out, text)


def sanitize_text(text: str) -> str:
    """Return the start of a peer's text without control or invisible characters."""
    return printable("".join(c for c in text[:_MAX_LENGTH] if unicodedata.category(c) != "Cf"))


class LogFormatter(logging.Formatter):
    """Formats a record as one line of plain text, followed by a traceback if there is one."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        record = copy.copy(record)
        record.msg, record.args = printable(record.getMessage()), ()
        return printable(super().format(record), keep="\n\t")
