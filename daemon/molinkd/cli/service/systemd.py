"""A user unit of systemd (Linux)."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from molink.errors import MolinkError
from molinkd.cli.service.base import (
    RunCommand,
    ServiceStatus,
    read_template,
    run_checked,
    run_command,
)

UNIT_NAME = "molink.service"
_SYSTEMCTL = ("systemctl", "--user")
_ALTERNATIVE = (
    "have your system run `molink up --background` or `molink join --background` at its start"
)


class SystemdService:
    """See :class:`molinkd.cli.service.base.SystemService`."""

    def __init__(
        self, run: RunCommand = run_command, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._run = run
        config = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        self.path = Path(config) / "systemd" / "user" / UNIT_NAME

    def check_available(self) -> None:
        """Whether systemd runs units of this user: without a session of its own it doesn't."""
        if shutil.which("systemctl") is None and self._run is run_command:
            raise MolinkError(f"there is no systemd on this PC: {_ALTERNATIVE}")
        try:
            run_checked(self._run, [*_SYSTEMCTL, "daemon-reload"])
        except MolinkError as error:
            raise MolinkError(
                f"{error}. Log in on this PC as yourself, or {_ALTERNATIVE}"
            ) from error

    def install_service(self, command: Sequence[str]) -> str:
        """Write, enable and start the unit; see the protocol."""
        self.check_available()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = Template(read_template(UNIT_NAME)).substitute(
            COMMAND=" ".join(map(_quote_word, command))
        )
        self.path.write_text(text, encoding="utf-8")
        try:
            for verb in (["daemon-reload"], ["enable", UNIT_NAME], ["restart", UNIT_NAME]):
                run_checked(self._run, [*_SYSTEMCTL, *verb])
        except MolinkError:
            self.path.unlink(missing_ok=True)
            raise
        return "For it to run while you are not logged in: loginctl enable-linger"

    def uninstall_service(self) -> bool:
        """Stop, disable and delete the unit; whether there was one."""
        if not self.path.exists():
            return False
        run_checked(self._run, [*_SYSTEMCTL, "disable", "--now", UNIT_NAME])
        self.path.unlink(missing_ok=True)
        run_checked(self._run, [*_SYSTEMCTL, "daemon-reload"])
        return True

    def get_status(self) -> ServiceStatus:
        """By the unit's file, and by ``systemctl is-active``."""
        if not self.path.exists():
            return ServiceStatus(False, f"there is no {self.path}")
        answer = self._run([*_SYSTEMCTL, "is-active", UNIT_NAME])
        return ServiceStatus(True, answer.text)


def _quote_word(word: str) -> str:
    """A word of ``ExecStart`` as systemd reads it: ``%`` and ``$`` mean something there."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
