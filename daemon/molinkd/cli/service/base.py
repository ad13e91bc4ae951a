"""The service protocol, common to all operating systems."""

import subprocess
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple, Protocol

from molink.errors import MolinkError

#: Timeout of system commands, in seconds.
_COMMAND_TIMEOUT_S = 60.0


class CommandResult(NamedTuple):
    """Exit code and output of a system command."""

    code: int
    text: str


#: Runs a system command.
RunCommand = Callable[[Sequence[str]], CommandResult]


class ServiceStatus(NamedTuple):
    """``detail`` is the system's own description."""

    installed: bool
    detail: str


class SystemService(Protocol):
    """The service ``molink`` of the current user. All methods raise :class:`MolinkError`."""

    def check_available(self) -> None:
        """Raise if this user can't have a service; changes nothing."""

    def install_service(self, command: Sequence[str]) -> str:
        """Run ``command`` now and at every start of the PC; returns a hint for the user."""

    def uninstall_service(self) -> bool:
        """Stop and remove the service; returns whether it existed."""

    def get_status(self) -> ServiceStatus:
        """Return whether the service is installed."""


def read_template(name: str) -> str:
    """Read a template of ``daemon/units``."""
    return (resources.files("molinkd.units") / name).read_text(encoding="utf-8")


def run_command(command: Sequence[str]) -> CommandResult:
    """Run a system command.

    Raises:
        MolinkError: it is missing or does not exit.
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
        raise MolinkError(f"can't run `{' '.join(command)}`: {error}") from error
    return CommandResult(done.returncode, done.stdout.decode("utf-8", "replace").strip())


def run_checked(run: RunCommand, command: Sequence[str]) -> CommandResult:
    """Run a command that must succeed.

    Raises:
        MolinkError: it failed.
    """
    answer = run(command)
    if answer.code:
        raise MolinkError(f"`{' '.join(command)}` failed: {answer.text or f'code {answer.code}'}")
    return answer
