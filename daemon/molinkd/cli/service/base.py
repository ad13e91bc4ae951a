"""What a service is, whichever system keeps it running."""

import subprocess
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple, Protocol

from molink.errors import MolinkError

#: Longest time that a command of the system may take, in seconds.
_COMMAND_TIMEOUT_S = 60.0


class CommandResult(NamedTuple):
    """How a command of the system ended, and what it said."""

    code: int
    text: str


#: Runs a command of the system.
RunCommand = Callable[[Sequence[str]], CommandResult]


class ServiceStatus(NamedTuple):
    """``detail`` is what the system says of it, for a person."""

    installed: bool
    detail: str


class SystemService(Protocol):
    """The service ``molink`` of the user who asks. All raise :class:`MolinkError`."""

    def check_available(self) -> None:
        """Raise if this user can have no service here; changes nothing."""

    def install_service(self, command: Sequence[str]) -> str:
        """Have ``command`` run now and after each start of the PC; returns what else to know."""

    def uninstall_service(self) -> bool:
        """Stop it and take it away; whether there was one."""

    def get_status(self) -> ServiceStatus:
        """Whether there is one."""


def read_template(name: str) -> str:
    """A file of ``daemon/units``."""
    return (resources.files("molinkd.units") / name).read_text(encoding="utf-8")


def run_command(command: Sequence[str]) -> CommandResult:
    """Run a command of the system.

    Raises:
        MolinkError: it isn't there, or does not end.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MolinkError(f"`{' '.join(command)}` can't be run: {error}") from error
    return CommandResult(done.returncode, done.stdout.decode("utf-8", "replace").strip())


def run_checked(run: RunCommand, command: Sequence[str]) -> CommandResult:
    """Run a command that has to succeed.

    Raises:
        MolinkError: it failed.
    """
    answer = run(command)
    if answer.code:
        raise MolinkError(f"`{' '.join(command)}` failed: {answer.text or f'code {answer.code}'}")
    return answer
