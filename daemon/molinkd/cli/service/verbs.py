"""``molink service install``, ``uninstall``, ``status``, and what the service itself runs."""

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
from molinkd.peer.home import Home
from molinkd.peer.membership.membership_record import MembershipRecord, read_membership
from molinkd.peer.run_file import read_run_file

service_app = typer.Typer(help="Keep molink running on this PC, from each start on.")


def system_service() -> SystemService:
    """That of this PC's system."""
    return TaskSchedulerService() if sys.platform == "win32" else SystemdService()


@service_app.command()
def install(home: HomeOption = None) -> None:
    """Have this PC's part in its swarm run from now on.

    Also when the PC was switched off and on, and again if it has died.
    """
    place = Home.find_home(home)
    member = _require_membership(place)
    service = system_service()
    service.check_available()  # before the daemon is ended for it
    run_file = read_run_file(place.run_file)
    if run_file is not None:
        stop_daemon(place, run_file)
        print("The daemon that ran here was ended: the service goes on in its place.")
    more = service.install_service(service_command(place))
    print(printable(f"This PC's part in swarm {member.swarm} is a service now. {more}"))


@service_app.command()
def uninstall() -> None:
    """End the service and take it away; the swarm is not left."""
    there = system_service().uninstall_service()
    print("The service is gone." if there else "There was no service.")


@service_app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Say whether there is a service, and whether molink runs."""
    found = system_service().get_status()
    run_file = read_run_file(Home.find_home(home).run_file)
    if as_json:
        pid = run_file.pid if run_file is not None else None
        print(json.dumps({"installed": found.installed, "pid": pid, "detail": found.detail}))
    else:
        print("The service is installed." if found.installed else "There is no service.")
        print(
            f"molink runs (process {run_file.pid})."
            if run_file is not None
            else "molink does not run."
        )
        if found.detail:
            print(printable(found.detail, keep="\n"))
    raise typer.Exit(0 if found.installed and run_file is not None else 1)


@service_app.command(hidden=True)
def run(home: HomeOption = None) -> None:
    """What the service runs: the daemon, as it was started last."""
    place = Home.find_home(home)
    start_daemon("up" if _require_membership(place).is_founder else "join", place, {}, invite=False)


def service_command(home: Home) -> list[str]:
    """The command line of the service."""
    python = Path(sys.executable)
    if sys.platform == "win32":
        python = python.with_name("pythonw.exe")  # without a window
    return [str(python), "-P", "-m", "molinkd", "service", "run", "--home", str(home.root)]


def _require_membership(home: Home) -> MembershipRecord:
    member = read_membership(home.membership)
    if member is None:
        raise UsageError(
            f"this PC is in no swarm (state folder {home.root}): run {home.format_command('up')} "
            "or "
            f"{home.format_command('join')} once, with the options that the service is to have"
        )
    return member
