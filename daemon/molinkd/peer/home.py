"""A daemon's state folder and its lock."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import platformdirs
import psutil

from molink.errors import UsageError
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.secrets import load_keys, private_folder, write_secret
from molinkd.peer.command_line import molink_command, quote_word
from molinkd.platform import lock_file, unlock_file

#: Maximum number of concurrent demos per home.
MAX_DEMOS = 8


@dataclass(frozen=True, slots=True)
class Home:
    """Paths of a daemon's state, readable by the owner only."""

    root: Path

    @classmethod
    def find_home(cls, explicit: Path | None = None) -> "Home":
        """The folder given explicitly, by ``MOLINK_HOME``, or the platform's default."""
        if explicit is None:
            named = os.environ.get("MOLINK_HOME")
            explicit = Path(named) if named else platformdirs.user_state_path("molink", False)
        return cls(explicit.expanduser().absolute())

    def format_command(self, command: str) -> str:
        """`` `molink COMMAND` `` as typed on this PC for this home.

        Uses molink's path if it is not on the PATH, and ``--home`` if this is not the default home.
        """
        if self.root == Home.find_home().root:
            return f"`{molink_command()} {command}`"
        return f"`{molink_command()} {command} --home {quote_word(str(self.root))}`"

    def create_folders(self) -> "Home":
        """Create the folders.

        Raises:
            UsageError: A folder can't be created.
        """
        for folder in (self.root, self.models, self.logs):
            try:
                private_folder(folder)
            except OSError as error:
                raise UsageError(
                    f"can't create the state folder {folder}: {error.strerror or error} (--home)"
                ) from error
        return self

    def load_keys(self) -> KeyPair:
        """This peer's key pair, created at first use."""
        return load_keys(self.root / "peer.key")

    def demo_home(self, number: int) -> "Home":
        """Home of the demo with that number."""
        return Home(self.root / ("demo" if number == 1 else f"demo-{number}"))

    def demo_homes(self) -> list["Home"]:
        """Homes of all demos that may run at once."""
        return [self.demo_home(number) for number in range(1, MAX_DEMOS + 1)]

    def demo_peer(self, number: int) -> "Home":
        """Home of a demo's daemon; the first one founds its swarm."""
        return Home(self.root / f"peer-{number}")

    def demo_peers(self) -> list["Home"]:
        """Homes of a demo's daemons that exist."""
        return [Home(path) for path in sorted(self.root.glob("peer-*")) if path.is_dir()]

    @property
    def config(self) -> Path:
        """Settings of this home; they override the platform's configuration file."""
        return self.root / "config.toml"

    @property
    def options(self) -> Path:
        """Options of the last start."""
        return self.root / "options.json"

    @property
    def membership(self) -> Path:
        """The swarm that this peer belongs to."""
        return self.root / "swarm.json"

    @property
    def replica(self) -> Path:
        """Replica of the coordinator's state."""
        return self.root / "replica.msgpack"

    @property
    def rendezvous(self) -> Path:
        """Secret of the rendezvous that this PC runs."""
        return self.root / "rendezvous.key"

    @property
    def run_file(self) -> Path:
        """Where the command line finds the running daemon."""
        return self.root / "run.json"

    @property
    def coordinator(self) -> Path:
        """State of the coordinator on this PC."""
        return self.root / "coordinator"

    @property
    def models(self) -> Path:
        """Model files from other peers."""
        return self.root / "models"

    @property
    def unpacked(self) -> Path:
        """Models converted from GGUF files."""
        return self.root / "unpacked"

    @property
    def hashes(self) -> Path:
        """Cached digests of provided model files."""
        return self.root / "hashes"

    @property
    def logs(self) -> Path:
        """Logs of the daemon's child processes."""
        return self.root / "logs"

    @property
    def profiles(self) -> Path:
        """Cached stage profiles."""
        return self.root / "profiles"

    @property
    def device(self) -> Path:
        """Cached measurement of this PC's device."""
        return self.root / "device.json"

    @property
    def devices(self) -> Path:
        """Homes of the additional devices' daemons."""
        return self.root / "devices"

    def device_homes(self) -> list["Home"]:
        """Homes of the additional devices' daemons that exist."""
        return [Home(path) for path in sorted(self.devices.glob("*/*")) if path.is_dir()]

    @property
    def disabled_kernels(self) -> Path:
        """Kernels that failed ``molink doctor`` on this PC's device."""
        return self.root / "avoid.json"

    @property
    def kernel_checks(self) -> Path:
        """Results of the kernel checks at loading."""
        return self.root / "proofs.json"


def downloads_folder() -> Path:
    """Models that molink itself downloaded, for all homes of this account."""
    return platformdirs.user_cache_path("molink", False) / "models"


def copy_measurements(source: Home, target: Home) -> None:
    """Copy the device measurements of ``source`` to ``target``, a home on the same device.

    Files that can't be copied are measured again.
    """
    for path in (source.device, source.kernel_checks, *source.profiles.glob("*.json")):
        if path.exists():
            copy = target.root / path.relative_to(source.root)
            private_folder(copy.parent)
            with contextlib.suppress(OSError):
                shutil.copy2(path, copy)


class HomeLock:
    """Held while a process uses a home; the operating system releases it if the process dies."""

    def __init__(self, home: Home) -> None:
        self._home, self._path = home, home.root / "lock"
        self._file: IO[bytes] | None = None

    def try_acquire(self) -> bool:
        """Acquire the lock; ``False`` if another process holds it."""
        file = self._path.open("a+b")
        if lock_file(file):
            self._file = file
            return True
        file.close()
        return False

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            UsageError: Another process holds it.
        """
        if not self.try_acquire():
            raise UsageError(
                f"another molink daemon uses {self._home.root}. See "
                f"{self._home.format_command('status')}; "
                f"{self._home.format_command('down')} stops it. Or use another state folder "
                "with --home."
            )

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                unlock_file(self._file)
            self._file.close()
            self._file = None


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """A running daemon. ``started`` (Unix time) guards against reuse of its process id."""

    pid: int
    started: float
    control_port: int
    endpoint: str
    #: Host of the control socket, for this PC.
    control_host: str = "127.0.0.1"
    #: API endpoints of all peers of a demo.
    demo: tuple[str, ...] = ()
    #: An API key of the endpoint, for this user's commands; empty if it needs none.
    api_key: str = ""
    #: The owner's token of the endpoint (:mod:`molinkd.api.access_guard`).
    owner_token: str = ""

    @classmethod
    def of_this_process(
        cls,
        control_port: int,
        endpoint: str,
        demo: tuple[str, ...] = (),
        control_host: str = "127.0.0.1",
        api_key: str = "",
        owner_token: str = "",
    ) -> "RunFile":
        """The run file of the calling process."""
        process = psutil.Process()
        return cls(
            pid=process.pid,
            started=process.create_time(),
            control_port=control_port,
            endpoint=endpoint,
            control_host=control_host,
            demo=demo,
            api_key=api_key,
            owner_token=owner_token,
        )

    def save_file(self, path: Path) -> None:
        """Write the file atomically."""
        write_secret(path, msgspec.json.encode(self).decode("utf-8"))

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        try:
            process = psutil.Process(self.pid)
            same = bool(abs(process.create_time() - self.started) < 2.0)
            return same and bool(process.status() != psutil.STATUS_ZOMBIE)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def read_run_file(path: Path) -> RunFile | None:
    """The run file of a running daemon; ``None`` if it is missing or stale."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=RunFile)
    except (OSError, msgspec.MsgspecError):
        return None
    return note if note.is_alive() else None


def read_run_files(home: Home) -> Iterator[tuple[Home, RunFile]]:
    """The daemon and the demos that run in ``home``: their homes and run files."""
    for place in (home, *home.demo_homes()):
        run_file = read_run_file(place.run_file)
        if run_file is not None:
            yield place, run_file
