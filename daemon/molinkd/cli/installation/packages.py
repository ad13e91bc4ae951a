"""Installs packages into the environment that runs molink."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from molink.errors import MolinkError


def installer_command() -> list[str]:
    """The words before the arguments of ``pip install`` for this environment.

    An environment of ``uv tool`` has no pip, but then there is uv.

    Raises:
        MolinkError: there is neither.
    """
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        return [*pip, "install"]
    uv = shutil.which("uv")
    if uv is None:
        raise MolinkError(
            f"{sys.prefix} has no pip, and uv is not on the PATH: install one of them"
        )
    return [uv, "pip", "install", "--python", sys.executable]


def install_packages(arguments: Sequence[str], what: str) -> None:
    """Run ``pip install`` with its progress on the terminal.

    Both pip and uv download everything before they replace anything.

    Raises:
        MolinkError: it failed; ``what`` says what is missing then.
    """
    command = [*installer_command(), *arguments]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False)
    except OSError as error:
        raise MolinkError(f"can't install {what}: {error}") from error
    if done.returncode:
        raise MolinkError(
            f"{what} could not be installed (exit code {done.returncode}; the lines above say "
            "why). Is the network there, and HTTPS_PROXY set if it needs one? Then run this again."
        )
