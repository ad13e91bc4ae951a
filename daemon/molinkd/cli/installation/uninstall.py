"""``molink uninstall``."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import platformdirs
import typer

from molink.errors import MolinkError, UsageError
from molink.plaintext import printable
from molinkd.cli import daemon_client
from molinkd.cli.confirmation import YesOption, confirm_action
from molinkd.cli.installation.kinds import Installation, find_installation
from molinkd.cli.service.verbs import system_service
from molinkd.cli.stop_verbs import leave, stop_daemon, try_remove, wait_until
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.home import Home
from molinkd.peer.membership.membership_record import read_membership
from molinkd.platform import child_options

#: What the installers put into a release's folder, and what they put on the PATH of Windows.
_PARTS, _COPY = (".venv", "download"), "molink.exe"
#: Deletes parts of a folder, and the folder if nothing else is in it. A program of Windows can only
#: be deleted once it has ended.
_DELETE = """
import pathlib, shutil, sys, time
folder = pathlib.Path(sys.argv[1])
parts = [folder / name for name in sys.argv[2:]]
for _ in range(600):
    for part in parts:
        try:
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        except OSError:
            pass
    if not any(part.exists() for part in parts):
        break
    time.sleep(0.1)
else:
    sys.exit(1)
try:
    folder.rmdir()
except OSError:
    pass
"""


def uninstall(
    keep_state: Annotated[
        bool, typer.Option("--keep-state", help="Keep the swarm, keys, settings and models.")
    ] = False,
    yes: YesOption = False,
    home: HomeOption = None,
) -> None:
    """Remove molink from this PC: the program, its service and its state.

    It leaves the swarm first, unless the state is kept. Without a terminal it needs --yes.
    """
    installed = find_installation()
    homes = list_homes(Home.find_home(home))
    state = [] if keep_state else list_state(homes, installed)
    confirm_action(_question(installed, state), yes=yes, is_final=True)
    for place in homes:
        _stop(place, leaves=not keep_state)
    if system_service().uninstall_service():
        print("Removed the service.")
    for path in state:
        if not wait_until(partial(try_remove, path)):
            raise UsageError(f"can't delete {path}: close what uses it, then run this again")
        print(printable(f"Deleted {path}"))
    remove_program(installed)


def list_homes(asked: Home) -> list[Home]:
    """The state folder that was asked for, and this account's default one."""
    default = Home(platformdirs.user_state_path("molink", False))
    return list(dict.fromkeys((asked, default)))


def list_state(homes: list[Home], installed: Installation) -> list[Path]:
    """Folders of molink's own on this PC: state, settings and downloads, without nested ones.

    Raises:
        UsageError: one of ``homes`` is a folder of other things, too.
    """
    asked, *_ = homes
    if asked.root.is_dir() and not (asked.root / "peer.key").exists() and any(asked.root.iterdir()):
        raise UsageError(f"{asked.root} is no state folder of molink: nothing was deleted")
    for precious in (Path.home(), installed.folder):
        if precious.resolve().is_relative_to(asked.root.resolve()):
            raise UsageError(f"{asked.root} holds {precious}, too: nothing was deleted")
    found = [home.root for home in homes]
    found += [platformdirs.user_config_path("molink", False)]
    found += [platformdirs.user_cache_path("molink", False)]
    there = sorted({path for path in found if path.is_dir()})
    return [one for one in there if not any(one != up and one.is_relative_to(up) for up in there)]


def remove_program(installed: Installation) -> None:
    """Remove the program that runs this.

    Raises:
        MolinkError: another program, which has to do it, fails.
    """
    remove_from_path(installed.folder)
    if installed.kind == "clone":
        _delete_parts(installed.folder, _PARTS[:1])
        print(printable(f"Removed molink; the clone is yours to delete: {installed.folder}"))
        return
    if installed.kind == "release":
        _delete_parts(installed.folder, _PARTS)
        print("Removed molink. Models from the Hugging Face hub remain in the hub's own cache.")
        return
    command = removal_command(installed)
    if sys.platform == "win32" and installed.kind != "pip":
        print(f"To remove the program, which runs until now: {' '.join(command)}")
        return
    done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise MolinkError(f"the program remains: `{' '.join(command)}` failed")


def removal_command(installed: Installation) -> list[str]:
    """The command that removes molink, by the tool that manages the environment."""
    if installed.kind == "pip":
        return [sys.executable, "-m", "pip", "uninstall", "--yes", "molink"]
    tools = {"uv": ("uv", "tool"), "pipx": ("pipx",), "brew": ("brew",)}
    return [*tools[installed.kind], "uninstall", "molink"]


def remove_from_path(folder: Path) -> None:
    """Remove the PATH entry that the installers added for the program in ``folder``."""
    if sys.platform == "win32":
        programs = Path(os.environ["LOCALAPPDATA"], "Programs", "molink")
        if programs == folder or not (programs / _PARTS[0]).exists():  # else a release's own
            _edit_user_path(programs)
            _delete_parts(programs, (_COPY,))
        return
    link = Path.home() / ".local" / "bin" / "molink"
    if link.is_symlink() and link.resolve().is_relative_to(folder.resolve()):
        link.unlink()


def _question(installed: Installation, state: list[Path]) -> str:
    text = f"Remove molink ({installed.folder})"
    if state:
        text += f" and delete {', '.join(map(str, state))}"
    return f"{text}?"


def _stop(home: Home, *, leaves: bool) -> None:
    """Stop what runs in a home; with ``leaves`` its PC leaves the swarm."""
    running = list(daemon_client.find_daemons(home))
    if any(found.is_demo for found in running):
        raise UsageError("a demo runs here: stop it with Ctrl-C first")
    if leaves and read_membership(home.membership) is not None:
        leave(dissolve=False, yes=True, home=home.root)
        return
    for found in running:
        stop_daemon(home, found.run_file)


def deletion_command(folder: Path, names: Sequence[str]) -> list[str]:
    """The command that deletes ``names`` in ``folder``, run by the environment's base Python."""
    base = getattr(sys, "_base_executable", sys.executable)
    return [base, "-I", "-c", _DELETE, str(folder), *names]


def _delete_parts(folder: Path, names: Sequence[str]) -> None:
    """Delete ``names`` in ``folder``, on Windows after this process.

    Raises:
        MolinkError: one can't be deleted.
    """
    command = deletion_command(folder, names)
    if sys.platform == "win32":
        none, options = subprocess.DEVNULL, child_options()
        subprocess.Popen(
            command,
            stdin=none,
            stdout=none,
            stderr=none,
            cwd=tempfile.gettempdir(),
            **options,
        )
    elif subprocess.run(command, check=False).returncode:
        raise MolinkError(f"can't delete {', '.join(names)} in {folder}")


if sys.platform == "win32":
    import winreg

    def _edit_user_path(folder: Path) -> None:
        """Take ``folder`` off this user's PATH."""
        access = winreg.KEY_READ | winreg.KEY_WRITE
        with winreg.OpenKey(winreg.HKEY_CURRENT_USER, "Environment", 0, access) as key:
            try:
                value, kind = winreg.QueryValueEx(key, "Path")
            except FileNotFoundError:
                return
            kept = [part for part in value.split(";") if part and Path(part) != folder]
            if len(kept) != len([part for part in value.split(";") if part]):
                winreg.SetValueEx(key, "Path", 0, kind, ";".join(kept))
