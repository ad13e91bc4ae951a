"""Profiles on disk: a stage that is loaded again need not be measured again."""

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Annotated

import msgspec

from molink.facts.profile import Profile
from molink.files import retry_while_busy

log = logging.getLogger(__name__)

#: Profiles that are kept, the youngest ones.
MAX_PROFILES = 64
_MAX_BYTES = 1 << 16


class _CachedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A file: what was measured, and of what, in full.

    Profiles of a ``model_key`` differ only in which layers they are of, ``step_bytes`` of weights.
    """

    key: str
    profile: Profile
    model_key: str = ""
    step_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class ProfileCache:
    """A folder with a JSON file for each profile.

    A key says everything that a time depends on. A file that can't be read, or is another's, is
    as good as none; nor does a folder that can't be written stop anybody.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_profile(self, key: str) -> Profile | None:
        """The profile under ``key``, if it is there."""
        entry = self._read_entry(self._entry_path(key))
        return entry.profile if entry is not None and entry.key == key else None

    def predict_profile(self, model_key: str, step_bytes: int) -> Profile | None:
        """What a stage of ``kin`` should take by the one that is nearest to it in bytes."""
        found: list[tuple[float, Profile]] = []
        for path in self._folder.glob("*.json"):
            entry = self._read_entry(path)
            if (
                entry is not None
                and entry.model_key == model_key
                and entry.step_bytes > 0 < step_bytes
            ):
                found.append((step_bytes / entry.step_bytes, entry.profile))
        if not found:
            return None
        factor, profile = min(found, key=lambda each: max(each[0], 1 / each[0]))
        return profile.scale_by(factor)

    def _read_entry(self, path: Path) -> _CachedProfile | None:
        try:
            if path.stat().st_size > _MAX_BYTES:
                return None
            return msgspec.json.decode(path.read_bytes(), type=_CachedProfile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("ignoring the profile in %s: %s", path, error)
            return None

    def store_profile(
        self, key: str, profile: Profile, model_key: str = "", step_bytes: int = 0
    ) -> None:
        """Write a profile; the oldest of too many goes."""
        entry = _CachedProfile(key=key, profile=profile, model_key=model_key, step_bytes=step_bytes)
        path = self._entry_path(key)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(entry))
            retry_while_busy(lambda: draft.replace(path))
        except OSError as error:
            log.warning("can't keep a profile in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        # Others may prune at the same time, and on Windows nobody deletes what somebody reads.
        with contextlib.suppress(OSError):
            prune_profiles(self._folder)

    def _entry_path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode("utf-8")).hexdigest()[:32]
        return self._folder / f"{name}.json"


def prune_profiles(folder: Path) -> None:
    """Keep the :data:`MAX_PROFILES` youngest in ``folder``."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files[:-MAX_PROFILES]:
        path.unlink(missing_ok=True)
