"""A task of the Windows Task Scheduler that starts at logon."""

import getpass
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

from molinkd.cli.service.base import (
    RunCommand,
    ServiceStatus,
    read_template,
    run_checked,
    run_command,
)

TASK_NAME = "molink"
_XML_TEMPLATE = "molink.xml"
#: An absolute path, so that a program in the current folder is never run instead.
_SCHTASKS = str(Path(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "schtasks.exe"))


class TaskSchedulerService:
    """See :class:`molinkd.cli.service.base.SystemService`."""

    def __init__(self, run: RunCommand = run_command) -> None:
        self._run = run

    def check_available(self) -> None:
        """Do nothing: every user may have tasks."""

    def install_service(self, command: Sequence[str]) -> str:
        """Create and start the task."""
        text = task_xml(command, _qualified_user())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / _XML_TEMPLATE
            path.write_text(text, encoding="utf-16")
            run_checked(
                self._run, [_SCHTASKS, "/Create", "/TN", TASK_NAME, "/XML", str(path), "/F"]
            )
        run_checked(self._run, [_SCHTASKS, "/Run", "/TN", TASK_NAME])
        return "It starts whenever you log on."

    def uninstall_service(self) -> bool:
        """End and delete the task."""
        if not self.get_status().installed:
            return False
        self._run([_SCHTASKS, "/End", "/TN", TASK_NAME])
        run_checked(self._run, [_SCHTASKS, "/Delete", "/TN", TASK_NAME, "/F"])
        return True

    def get_status(self) -> ServiceStatus:
        """Query the task with ``schtasks``, whose output is localized."""
        answer = self._run([_SCHTASKS, "/Query", "/TN", TASK_NAME, "/FO", "LIST"])
        return ServiceStatus(answer.code == 0, answer.text)


def task_xml(command: Sequence[str], user: str) -> str:
    """Render the task as XML. ``command`` is a program with its arguments."""
    program, *arguments = command
    return Template(read_template(_XML_TEMPLATE)).substitute(
        USER=escape(user),
        PROGRAM=escape(program),
        ARGUMENTS=escape(subprocess.list2cmdline(arguments)),
    )


def _qualified_user() -> str:
    domain = os.environ.get("USERDOMAIN")
    name = getpass.getuser()
    return f"{domain}\\{name}" if domain else name
