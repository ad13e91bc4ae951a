"""A join token that was typed on the command line stands in ``ps`` for every user of the PC."""

import contextlib
import os
import sys

#: Where ``molink join`` finds it instead; only the user's own processes can read that.
TOKEN_VARIABLE = "MOLINK_TOKEN"

if sys.platform == "win32":

    def hide_token(token: str) -> None:
        """Windows shows command lines to nobody but the user and administrators."""

else:

    def hide_token(token: str) -> None:
        """Go on as the same process with the same command line, but for the token.

        Does nothing if the token didn't come from there; if it can't be done, it stays there.
        """
        if not token or token not in sys.orig_argv[1:]:
            return
        arguments = [sys.executable, *without_token(token, sys.orig_argv[1:])]
        with contextlib.suppress(OSError):
            os.execve(sys.executable, arguments, {**os.environ, TOKEN_VARIABLE: token})


def without_token(token: str, arguments: list[str]) -> list[str]:
    """``arguments`` but for the last that is the token: an option may have the same text."""
    at = len(arguments) - 1 - arguments[::-1].index(token)
    return [*arguments[:at], *arguments[at + 1 :]]
