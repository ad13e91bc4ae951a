"""``molink service install``, ``uninstall``, ``status``, and the command that the service runs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from molink.errors import UsageError
from molink.plaintext import printable
from molinkd.cli.daemon_start import start_daemon
from molinkd.cli.service.base import SystemService
from molinkd.cli.service.systemd import SystemdService
from molinkd.cli.service.task_scheduler import TaskSchedulerService
from molinkd.cli.stop_verbs import stop_daemon
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.home import Home, read_run_file
from molinkd.peer.membership.membership_record import MembershipRecord, read_membership

service_app = typer.Typer(help="Run molink automatically at startup.")


def system_service() -> SystemService:
    """Return the service of this operating system."""
    return TaskSchedulerService() if sys.platform == "win32" else SystemdService()


@service_app.command()
def install(home: HomeOption = None) -> None:
    """Run molink automatically at startup and after a crash."""
    place = Home.find_home(home)
    member = _require_membership(place)
    service = system_service()
    service.check_available()  # before the daemon is stopped for it
    run_file = read_run_file(place.run_file)
    if run_file is not None:
        stop_daemon(place, run_file)
        print("Stopped the running daemon: the service replaces it.")
    more = service.install_service(service_command(place))
    print(printable(f"Installed the service for swarm {member.swarm}. {more}"))


@service_app.command()
def uninstall() -> None:
    """Stop and remove the service; this PC stays in the swarm."""
    there = system_service().uninstall_service()
    print("Removed the service." if there else "No service was installed.")


@service_app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Show whether it is installed and molink is running."""
    found = system_service().get_status()
    run_file = read_run_file(Home.find_home(home).run_file)
    if as_json:
        pid = run_file.pid if run_file is not None else None
        print(json.dumps({"installed": found.installed, "pid": pid, "detail": found.detail}))
    else:
        print("The service is installed." if found.installed else "The service is not installed.")
        print(
            f"molink is running (process {run_file.pid})."
            if run_file is not None
            else "molink is not running."
        )
        if found.detail:
            print(printable(found.detail, keep="\n"))
    raise typer.Exit(0 if found.installed and run_file is not None else 1)


@service_app.command(hidden=True)
def run(home: HomeOption = None) -> None:
    """Run the daemon with its saved options; started by the service."""
    place = Home.find_home(home)
    start_daemon("up" if _require_membership(place).is_founder else "join", place, {})


def service_command(home: Home) -> list[str]:
    """Return the command line of the service."""
    python = Path(sys.executable)
    if sys.platform == "win32":
        python = python.with_name("pythonw.exe")  # no console window
    return [str(python), "-P", "-m", "molinkd", "service", "run", "--home", str(home.root)]


def _require_membership(home: Home) -> MembershipRecord:
    member = read_membership(home.membership)
    if member is None:
        raise UsageError(
            f"this PC is not in a swarm (state folder {home.root}): run "
            f"{home.format_command('up')} or {home.format_command('join')} once, with the "
            "options for the service"
        )
    return member
