"""Runs other programs that know something of this PC."""

import shutil
import subprocess

from molinkd.platform import child_options

#: In seconds.
_TIMEOUT_S = 10.0


def run_program(program: str, *arguments: str) -> tuple[int, str] | None:
    """Run a program, by name or path, and return its exit code and all output.

    ``None`` if it is not installed. The code is negative, and the output says why, if it can't be
    started or does not end in time.
    """
    found = shutil.which(program)
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
            **child_options(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")
