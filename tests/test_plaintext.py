"""Text of other peers in terminals and logs."""

import logging
import sys

import pytest

from molink.plaintext import LogFormatter, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jhi\x07", r"\x1b[2Jhi\x07"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x9b31m\u202eexe\ud800", r"\x9b31m\u202eexe\ud800"),
        ("Jürgens Büro 本 👩\u200d🔬", "Jürgens Büro 本 👩\u200d🔬"),
    ],
)
def test_control_sequences_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_kept_characters_pass() -> None:
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_log_entry_is_one_line_before_its_traceback() -> None:
    try:
        raise ValueError("evil\x1b[2J")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("n", logging.INFO, "f", 1, "%s said", ("a\nb\x1b",), error)
    first, *rest = LogFormatter().format(record).split("\n")
    assert first.endswith(r"INFO n: a\nb\x1b said")
    assert rest[-1] == r"ValueError: evil\x1b[2J"
    assert record.getMessage() == "a\nb\x1b said"
