"""Hides a join token given on the command line from ``ps``."""

import contextlib
import os
import sys

#: Environment variable that holds the token instead; other users can't read it.
TOKEN_VARIABLE = "MOLINK_TOKEN"

if sys.platform == "win32":

    def hide_token(token: str) -> None:
        """Do nothing: Windows shows command lines only to the user and administrators."""

else:

    def hide_token(token: str) -> None:
        """Replace this process with the same command line without the token.

        Does nothing if the token is not on the command line, or if exec fails.
        """
        if not token or token not in sys.orig_argv[1:]:
            return
        arguments = [sys.executable, *without_token(token, sys.orig_argv[1:])]
        with contextlib.suppress(OSError):
            os.execve(sys.executable, arguments, {**os.environ, TOKEN_VARIABLE: token})


def without_token(token: str, arguments: list[str]) -> list[str]:
    """Remove the last occurrence of the token; an option may have the same text."""
    at = len(arguments) - 1 - arguments[::-1].index(token)
    return [*arguments[:at], *arguments[at + 1 :]]
