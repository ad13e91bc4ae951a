"""A systemd user unit (Linux)."""

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
    "configure your system to run `molink up --background` or `molink join --background` at startup"
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
        """Check that systemd runs units of this user, which needs a session."""
        if shutil.which("systemctl") is None and self._run is run_command:
            raise MolinkError(f"systemd is not available on this PC: {_ALTERNATIVE}")
        try:
            run_checked(self._run, [*_SYSTEMCTL, "daemon-reload"])
        except MolinkError as error:
            raise MolinkError(
                f"{error}. Log in on this PC as yourself, or {_ALTERNATIVE}"
            ) from error

    def install_service(self, command: Sequence[str]) -> str:
        """Write, enable and start the unit."""
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
        return "To keep it running while you are logged out: loginctl enable-linger"

    def uninstall_service(self) -> bool:
        """Stop, disable and delete the unit."""
        if not self.path.exists():
            return False
        run_checked(self._run, [*_SYSTEMCTL, "disable", "--now", UNIT_NAME])
        self.path.unlink(missing_ok=True)
        run_checked(self._run, [*_SYSTEMCTL, "daemon-reload"])
        return True

    def get_status(self) -> ServiceStatus:
        """Check the unit file and ``systemctl is-active``."""
        if not self.path.exists():
            return ServiceStatus(False, f"{self.path} does not exist")
        answer = self._run([*_SYSTEMCTL, "is-active", UNIT_NAME])
        return ServiceStatus(True, answer.text)


def _quote_word(word: str) -> str:
    """Quote a word for ``ExecStart``, where ``%`` and ``$`` are special."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
