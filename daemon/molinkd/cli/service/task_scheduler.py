"""A task of Windows' Task Scheduler that begins when its user logs on."""

import getpass
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

from molinkd.cli.service.base import Run, ServiceStatus, demand, run_command, template

TASK = "molink"
_XML = "molink.xml"
#: By its whole path: a program of the current directory must not be taken for it.
_SCHTASKS = str(Path(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "schtasks.exe"))


class TaskSchedulerService:
    """See :class:`molinkd.cli.service.base.SystemService`."""

    def __init__(self, run: Run = run_command) -> None:
        self._run = run

    def check(self) -> None:
        """Each user has tasks."""

    def install(self, command: Sequence[str]) -> str:
        """Make and start the task; see the protocol."""
        text = describe(command, _user())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / _XML
            path.write_text(text, encoding="utf-16")
            demand(self._run, [_SCHTASKS, "/Create", "/TN", TASK, "/XML", str(path), "/F"])
        demand(self._run, [_SCHTASKS, "/Run", "/TN", TASK])
        return "It begins whenever you log on."

    def uninstall(self) -> bool:
        """End and delete the task; whether there was one."""
        if not self.status().installed:
            return False
        self._run([_SCHTASKS, "/End", "/TN", TASK])
        demand(self._run, [_SCHTASKS, "/Delete", "/TN", TASK, "/F"])
        return True

    def status(self) -> ServiceStatus:
        """By what ``schtasks`` knows of the task, in the words of the system's language."""
        answer = self._run([_SCHTASKS, "/Query", "/TN", TASK, "/FO", "LIST"])
        return ServiceStatus(answer.code == 0, answer.text)


def describe(command: Sequence[str], user: str) -> str:
    """The task as XML. ``command`` is a program and its arguments."""
    program, *arguments = command
    return Template(template(_XML)).substitute(
        USER=escape(user),
        PROGRAM=escape(program),
        ARGUMENTS=escape(subprocess.list2cmdline(arguments)),
    )


def _user() -> str:
    domain = os.environ.get("USERDOMAIN")
    name = getpass.getuser()
    return f"{domain}\\{name}" if domain else name
