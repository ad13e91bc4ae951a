"""The folder in which a daemon keeps its state, and the lock that makes it the only one there."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs

from molink.errors import UsageError
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.secrets import load_keys, private_folder
from molinkd.peer.command_line import molink_command, quote_word
from molinkd.platform import lock_file, unlock_file


@dataclass(frozen=True, slots=True)
class Home:
    """Where everything of one daemon lies. Readable by its owner alone."""

    root: Path

    @classmethod
    def find_home(cls, explicit: Path | None = None) -> "Home":
        """The folder named on the command line, by ``MOLINK_HOME``, or the platform's own."""
        if explicit is None:
            named = os.environ.get("MOLINK_HOME")
            explicit = Path(named) if named else platformdirs.user_state_path("molink", False)
        return cls(explicit.expanduser().absolute())

    def format_command(self, command: str) -> str:
        """`` `molink COMMAND` `` as it is typed on this PC for this home: hints to a person.

        With molink's path where it isn't on the PATH, and with ``--home`` where it isn't the one
        that is taken without.
        """
        if self.root == Home.find_home().root:
            return f"`{molink_command()} {command}`"
        return f"`{molink_command()} {command} --home {quote_word(str(self.root))}`"

    def create_folders(self) -> "Home":
        """Make the folder if it isn't there.

        Raises:
            UsageError: it can't be made.
        """
        for folder in (self.root, self.models, self.logs):
            try:
                private_folder(folder)
            except OSError as error:
                raise UsageError(
                    f"can't make the state folder {folder}: {error.strerror or error} (--home)"
                ) from error
        return self

    def load_keys(self) -> KeyPair:
        """This peer's identity; made at first use."""
        return load_keys(self.root / "peer.key")

    def demo_home(self, number: int) -> "Home":
        """The home of the ``number``-th demo, under this one."""
        return Home(self.root / ("demo" if number == 1 else f"demo-{number}"))

    @property
    def config(self) -> Path:
        """Settings of this home; those of the platform's configuration folder come before."""
        return self.root / "config.toml"

    @property
    def options(self) -> Path:
        """The options of the last start."""
        return self.root / "options.json"

    @property
    def membership(self) -> Path:
        """The swarm that this peer belongs to."""
        return self.root / "swarm.json"

    @property
    def replica(self) -> Path:
        """The copy of the coordinator's state that this PC keeps."""
        return self.root / "replica.msgpack"

    @property
    def run_file(self) -> Path:
        """How the command line finds the running daemon."""
        return self.root / "run.json"

    @property
    def coordinator(self) -> Path:
        """State of the coordinator that ``molink up`` runs here."""
        return self.root / "coordinator"

    @property
    def models(self) -> Path:
        """Files of models that came from other peers."""
        return self.root / "models"

    @property
    def unpacked(self) -> Path:
        """Folders that were made of GGUF files."""
        return self.root / "unpacked"

    @property
    def hashes(self) -> Path:
        """Hashes of the files of models that this PC brought."""
        return self.root / "hashes"

    @property
    def logs(self) -> Path:
        """Logs of the daemon's child processes."""
        return self.root / "logs"

    @property
    def profiles(self) -> Path:
        """How long stages were measured to take."""
        return self.root / "profiles"

    @property
    def device(self) -> Path:
        """What was measured of this PC's device."""
        return self.root / "device.json"

    @property
    def devices(self) -> Path:
        """Homes of the daemons of this PC's further devices."""
        return self.root / "devices"

    @property
    def disabled_kernels(self) -> Path:
        """Kernels that this PC's device computes wrongly with, as ``molink doctor`` has found."""
        return self.root / "avoid.json"

    @property
    def kernel_checks(self) -> Path:
        """How kernels were found to compute when stages were loaded."""
        return self.root / "proofs.json"


def copy_measurements(source: Home, target: Home) -> None:
    """Give ``target``, a home on the same device, what ``source`` has measured of it.

    What can't be copied is measured again.
    """
    for path in (source.device, source.kernel_checks, *source.profiles.glob("*.json")):
        if path.exists():
            copy = target.root / path.relative_to(source.root)
            private_folder(copy.parent)
            with contextlib.suppress(OSError):
                shutil.copy2(path, copy)


class HomeLock:
    """Held while a process uses a home; the operating system lets go of it when that dies."""

    def __init__(self, home: Home) -> None:
        self._home, self._path = home, home.root / "lock"
        self._file: IO[bytes] | None = None

    def try_acquire(self) -> bool:
        """Take the lock; ``False`` if another process holds it."""
        file = self._path.open("a+b")
        if lock_file(file):
            self._file = file
            return True
        file.close()
        return False

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            UsageError: another process holds it.
        """
        if not self.try_acquire():
            raise UsageError(
                f"another molink daemon uses {self._home.root}. See "
                f"{self._home.format_command('status')}; "
                f"{self._home.format_command('down')} ends it. Or give this one its own folder "
                "with --home."
            )

    def release(self) -> None:
        """Let go of the lock; harmless if it isn't held."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                unlock_file(self._file)
            self._file.close()
            self._file = None
