"""Caches stage profiles on disk."""

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

#: Maximum number of cached profiles.
MAX_PROFILES = 64
_MAX_BYTES = 1 << 16


class _CachedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A cached profile with its full key.

    Profiles of one ``model_key`` differ only in their layers, with ``step_bytes`` of weights.
    """

    key: str
    profile: Profile
    model_key: str = ""
    step_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class ProfileCache:
    """A folder with one JSON file per profile.

    An unreadable or foreign file counts as missing, and failing to write is not an error.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_profile(self, key: str) -> Profile | None:
        """Return the profile of a key."""
        entry = self._read_entry(self._entry_path(key))
        return entry.profile if entry is not None and entry.key == key else None

    def predict_profile(self, model_key: str, step_bytes: int) -> Profile | None:
        """Scale that profile of the same model whose bytes are nearest."""
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
        """Store a profile and evict the oldest ones."""
        entry = _CachedProfile(key=key, profile=profile, model_key=model_key, step_bytes=step_bytes)
        path = self._entry_path(key)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(entry))
            retry_while_busy(lambda: draft.replace(path))
        except OSError as error:
            log.warning("can't store a profile in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        # Other processes may prune concurrently, and Windows refuses to delete open files.
        with contextlib.suppress(OSError):
            prune_profiles(self._folder)

    def _entry_path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode("utf-8")).hexdigest()[:32]
        return self._folder / f"{name}.json"


def prune_profiles(folder: Path) -> None:
    """Keep the newest :data:`MAX_PROFILES` profiles."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files[:-MAX_PROFILES]:
        path.unlink(missing_ok=True)
