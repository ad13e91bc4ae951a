"""Profiles on disk: a stage that is loaded again need not be measured again."""

import contextlib
import hashlib
import logging
import os
from pathlib import Path

import msgspec

from molink.facts.profile import Profile
from molink.files import patiently

log = logging.getLogger(__name__)

#: Profiles that are kept, the youngest ones.
MAX_FILES = 64
_MAX_BYTES = 1 << 16


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A file: what was measured, and of what, in full."""

    key: str
    profile: Profile


class ProfileCache:
    """A folder with a JSON file for each profile.

    A key says everything that a time depends on. A file that can't be read, or is another's, is
    as good as none; nor does a folder that can't be written stop anybody.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> Profile | None:
        """The profile under ``key``, if it is there."""
        path = self._path(key)
        try:
            if path.stat().st_size > _MAX_BYTES:
                return None
            entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("ignoring the profile in %s: %s", path, error)
            return None
        return entry.profile if entry.key == key else None

    def keep(self, key: str, profile: Profile) -> None:
        """Write a profile; the oldest of too many goes."""
        path = self._path(key)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(_Entry(key=key, profile=profile)))
            patiently(lambda: draft.replace(path))
        except OSError as error:
            log.warning("can't keep a profile in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        # Others may prune at the same time, and on Windows nobody deletes what somebody reads.
        with contextlib.suppress(OSError):
            self._prune()

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode("utf-8")).hexdigest()[:32]
        return self._folder / f"{name}.json"

    def _prune(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MAX_FILES]:
            path.unlink(missing_ok=True)
