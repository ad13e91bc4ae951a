"""``molink service`` with fake system commands."""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from molink.errors import MolinkError
from molinkd.cli.main import run
from molinkd.cli.service import base, verbs
from molinkd.cli.service.base import CommandResult
from molinkd.cli.service.systemd import SystemdService
from molinkd.cli.service.task_scheduler import TaskSchedulerService, task_xml
from molinkd.peer.home import Home
from molinkd.peer.membership.membership_record import MembershipRecord

COMMAND = ["/opt/my python", "-m", "molinkd", "service", "run", "--home", "/home/a b/50%$x"]
NAMESPACE = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


class System:
    """A fake system that records commands and fails on request."""

    def __init__(self, fails: Callable[[Sequence[str]], bool] = lambda _: False) -> None:
        self.commands: list[list[str]] = []
        self._fails = fails

    def run(self, command: Sequence[str]) -> CommandResult:
        self.commands.append(list(command))
        return (
            CommandResult(1, "no such thing")
            if self._fails(command)
            else CommandResult(0, "active")
        )


def systemd(system: System, tmp_path: Path) -> SystemdService:
    return SystemdService(system.run, {"XDG_CONFIG_HOME": str(tmp_path)})


def test_a_unit_is_written_enabled_and_started(tmp_path: Path) -> None:
    system = System()
    service = systemd(system, tmp_path)
    assert "enable-linger" in service.install_service(COMMAND)
    text = (tmp_path / "systemd" / "user" / "molink.service").read_text(encoding="utf-8")
    assert '"/opt/my python" "-m" "molinkd"' in text
    assert '"/home/a b/50%%$$x"' in text  # `%` and `$` are special to systemd
    assert "Restart=on-failure" in text
    assert "${" not in text
    verbs = [command[2] for command in system.commands]
    assert verbs == ["daemon-reload", "daemon-reload", "enable", "restart"]
    assert service.get_status() == (True, "active")


def test_a_unit_that_fails_to_start_is_removed(tmp_path: Path) -> None:
    service = systemd(System(lambda command: "enable" in command), tmp_path)
    with pytest.raises(MolinkError, match="no such thing"):
        service.install_service(COMMAND)
    assert not service.path.exists()


def test_a_unit_is_removed(tmp_path: Path) -> None:
    system = System()
    service = systemd(system, tmp_path)
    assert not service.uninstall_service()
    assert not system.commands
    service.install_service(COMMAND)
    assert service.uninstall_service()
    assert not service.path.exists()
    assert not service.get_status().installed


def test_a_task_holds_its_command() -> None:
    root = ElementTree.fromstring(
        task_xml([r"C:\Program Files\pythonw.exe", "-m", "molinkd", r"D:\a & b"], r"PC\<me>")
        .partition("?>")[2]
        .strip()
    )
    texts = {element.tag.removeprefix(NAMESPACE): element.text for element in root.iter()}
    assert texts["Command"] == r"C:\Program Files\pythonw.exe"
    assert texts["Arguments"] == r'-m molinkd "D:\a & b"'
    assert texts["UserId"] == r"PC\<me>"
    assert texts["ExecutionTimeLimit"] == "PT0S"  # no time limit
    assert texts["Count"] == "999"  # restarted after a failure
    assert texts["LogonType"] == "InteractiveToken"


def test_a_task_is_created_started_and_deleted() -> None:
    system = System()
    service = TaskSchedulerService(system.run)
    service.install_service(COMMAND)
    assert service.uninstall_service()
    assert [command[1] for command in system.commands] == [
        "/Create",
        "/Run",
        "/Query",
        "/End",
        "/Delete",
    ]
    assert all(Path(command[0]).name == "schtasks.exe" for command in system.commands)
    assert not TaskSchedulerService(System(lambda _: True).run).uninstall_service()


def test_a_command_that_is_missing_is_an_error() -> None:
    with pytest.raises(MolinkError, match="can't run"):
        base.run_command(["molink-has-no-such-command"])
    assert base.run_command([sys.executable, "-c", "print('yes')"]) == (0, "yes")


def test_a_service_needs_a_membership(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["service", "install", "--home", str(tmp_path)]) == 2
    assert "is not in a swarm" in capsys.readouterr().err


def test_installing_reports_its_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    system = System()
    monkeypatch.setattr(verbs, "system_service", lambda: systemd(system, tmp_path / "config"))
    home = Home(tmp_path / "home").create_folders()
    MembershipRecord(swarm="s", coordinator_key="k", addresses=()).save(home.membership)
    assert run(["service", "install", "--home", str(home.root)]) == 0
    assert "Installed the service for swarm s" in capsys.readouterr().out
    assert run(["service", "status", "--home", str(home.root)]) == 1  # no daemon runs
    out = capsys.readouterr().out
    assert "The service is installed." in out
    assert "molink is not running." in out
    assert run(["service", "uninstall"]) == 0
    assert "Removed" in capsys.readouterr().out


def test_without_a_session_the_daemon_keeps_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    system = System(lambda command: "--user" in command)
    monkeypatch.setattr(verbs, "system_service", lambda: systemd(system, tmp_path / "config"))
    monkeypatch.setattr(verbs, "read_run_file", lambda _: object())  # a daemon runs
    monkeypatch.setattr(verbs, "stop_daemon", lambda *_: pytest.fail("it was stopped"))
    home = Home(tmp_path / "home").create_folders()
    MembershipRecord(swarm="s", coordinator_key="k", addresses=()).save(home.membership)
    assert run(["service", "install", "--home", str(home.root)]) == 1
    errors = capsys.readouterr().err
    assert "daemon-reload` failed" in errors
    assert "molink up --background" in errors


@pytest.mark.parametrize(("own", "role"), [(True, "up"), (False, "join")])
def test_the_service_starts_the_previous_role(
    own: bool, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        verbs, "start_daemon", lambda *given, **more: started.append((*given, more))
    )
    home = Home(tmp_path).create_folders()
    MembershipRecord(swarm="s", coordinator_key="k", addresses=(), is_founder=own).save(
        home.membership
    )
    assert run(["service", "run", "--home", str(tmp_path)]) == 0
    assert started == [(role, home, {}, {})]
