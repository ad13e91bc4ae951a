"""``molink update``."""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

import molink
from molink.errors import MolinkError, Unavailable, UsageError
from molink.wire.protocol import PROTOCOL
from molinkd.cli import daemon_client
from molinkd.cli.confirmation import YesOption, confirm_action
from molinkd.cli.drain_verbs import drain
from molinkd.cli.installation.kinds import find_installation
from molinkd.cli.installation.packages import install_packages
from molinkd.cli.installation.releases import (
    PublishedRelease,
    download_file,
    fetch_release,
    find_url,
    is_newer,
)
from molinkd.cli.service.verbs import system_service
from molinkd.cli.stop_verbs import stop_daemon
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.agent.device_probe import torch_version
from molinkd.peer.home import Home
from molinkd.peer.membership.membership_record import read_membership

#: How long the swarm may take to take over this PC's layers, in seconds.
_DRAIN_S = 120.0
MOLINK = (sys.executable, "-P", "-m", "molinkd")

SourceOption = Annotated[
    str | None,
    typer.Option("--from", help="URL of the folder of releases.  [default: the package's own]"),
]


def update(
    check: Annotated[bool, typer.Option("--check", help="Only say what there is.")] = False,
    source: SourceOption = None,
    yes: YesOption = False,
    home: HomeOption = None,
) -> None:
    """Install the newest release on this PC, and start molink again if it runs.

    Keeps the swarm, settings and models. If anything fails, the version that is here remains.
    Update one PC after another, the leading one last.
    """
    release = fetch_release(find_url(source or ""))
    if not is_newer(release.notes.version, molink.__version__):
        print(f"molink {molink.__version__} is the newest release at {release.url}.")
        return
    print(describe_release(release))
    if check:
        return
    installed = find_installation()
    if installed.kind == "clone":
        raise UsageError(
            f"molink runs from the source folder {installed.folder}: update it there, by "
            f"`git pull` and {'install.ps1' if sys.platform == 'win32' else './install.sh'}"
        )
    if installed.kind == "brew":
        raise UsageError("Homebrew manages this molink: `brew upgrade molink && molink setup`")
    place = Home.find_home(home)
    with tempfile.TemporaryDirectory(prefix="molink-update-") as name:
        wheel = download_file(release, release.wheel, Path(name))
        lock = download_file(release, "requirements.txt", Path(name))
        restart = _stop_running_daemon(place, yes=yes)
        try:
            install_release(release, wheel, lock)
        finally:
            if restart:
                run_molink(restart, "molink does not start again; see `molink logs`")
    print(f"molink {release.notes.version} is installed.")


def describe_release(release: PublishedRelease) -> str:
    """What is new, and what it asks of the swarm."""
    notes = release.notes
    text = f"molink {notes.version} is available; this is {molink.__version__}."
    if notes.protocol != PROTOCOL:
        text += (
            f" It speaks protocol {notes.protocol}, this one {PROTOCOL}: PCs of both can't share a "
            "ring, so update all PCs."
        )
    return text


def install_release(release: PublishedRelease, wheel: Path, lock: Path) -> None:
    """Replace the packages of this environment, in one step that downloads everything first.

    Raises:
        MolinkError: that failed.
    """
    had_torch = torch_version()
    text = lock.read_text(encoding="utf-8")
    lock.write_text(drop_installed(text), encoding="utf-8")
    own = wheel.with_suffix(".txt")
    own.write_text(
        f"molink @ {wheel.as_uri()} --hash=sha256:{release.hashes[wheel.name]}\n", encoding="utf-8"
    )
    arguments = ["--require-hashes", "--no-deps", "-r", str(lock), "-r", str(own)]
    install_packages(arguments, f"molink {release.notes.version}")
    if had_torch != "none":
        flavour = ["--cpu"] if had_torch.endswith("+cpu") else []
        run_molink(["setup", *flavour], "the new version's torch is missing: run `molink setup`")


def drop_installed(lock: str) -> str:
    """The locked requirements without those whose version is installed, of which pip tells much."""
    blocks = re.split(r"\n(?=[^\s#])", lock)
    return "\n".join(block for block in blocks if not _is_installed(block))


def _is_installed(block: str) -> bool:
    head = re.match(r"([\w.-]+)==([^\s;]+)", block)
    try:
        return head is not None and version(head[1]) == head[2]
    except PackageNotFoundError:
        return False


def run_molink(arguments: list[str], failure: str) -> None:
    """Run a command of the molink that is installed now.

    Raises:
        MolinkError: it fails; ``failure`` says what that means.
    """
    done = subprocess.run([*MOLINK, *arguments], stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise MolinkError(failure)


def _stop_running_daemon(home: Home, *, yes: bool) -> list[str]:
    """Move this PC's layers away and stop molink; returns the words that start it again."""
    running = list(daemon_client.find_daemons(home))
    if any(found.is_demo for found in running):
        raise UsageError("a demo runs here: stop it with Ctrl-C first")
    if not running:
        return []
    (found,) = running
    _move_layers(found, yes=yes)
    member = read_membership(home.membership)
    role = "up" if member is not None and member.is_founder else "join"
    is_service = system_service().get_status().installed
    words = ["service", "install"] if is_service else [role, "--background"]
    stop_daemon(home, found.run_file)
    return [*words, "--home", str(home.root)]


def _move_layers(found: daemon_client.RunningDaemon, *, yes: bool) -> None:
    """Drain this PC, unless it is alone; its user decides what happens if that fails."""
    status = daemon_client.fetch_status(found)
    online = [peer for peer in status["peers"] if peer["state"] == "online"]
    if all(peer["daemon_pid"] == found.run_file.pid for peer in online):
        confirm_action("molink stops during the update. Continue?", yes=yes)
        return
    print("Moving this PC's layers to other PCs …", flush=True)
    try:
        drain(timeout=_DRAIN_S, home=found.home.root)
    except Unavailable as error:
        try:
            confirm_action(f"{error} Update anyway, which interrupts answers?", yes=yes)
        except typer.Exit:
            daemon_client.set_drain(found, "", on=False)
            raise
