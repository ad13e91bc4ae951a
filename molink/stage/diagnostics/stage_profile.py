"""The profile of a loaded stage: remembered, or measured now.

Profiles on disk: a stage that is loaded again need not be measured again.
"""

import contextlib
import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Annotated

import msgspec
import torch

import molink
from molink.facts.profile import Profile
from molink.files import retry_while_busy
from molink.stage.diagnostics.device import describe_device
from molink.stage.diagnostics.stage_passes import StagePasses
from molink.stage.diagnostics.timing import measure_profile
from molink.stage.stage import Stage

log = logging.getLogger(__name__)

#: Seconds that measuring takes at most, but for the smallest passes of a very slow stage.
MAX_PROFILING_S = 3.0
#: Part of a key: rises whenever profiles are measured in another way.
_FORMAT_VERSION = 2


def profile_stage(
    stage: Stage,
    kv_bytes: int,
    block_size: int,
    cache: Path | None = None,
    seconds: float = MAX_PROFILING_S,
    *,
    hurry: bool = False,
) -> Profile:
    """``T_d`` and ``T_p`` of ``stage``, from the folder ``cache`` if it was measured before.

    In a ``hurry``, with other layers of the same model measured here, it is scaled from theirs by
    the bytes of weights, and not kept: the next time without a hurry it is measured.

    Its KV pool, if any, is dropped; measuring takes up to ``kv_bytes`` for one of its own.

    Raises:
        MemoryError: not even a single row can be computed.
    """
    profile_cache = ProfileCache(cache) if cache is not None else None
    key = profile_key(stage, block_size)
    known = profile_cache.find_profile(key) if profile_cache is not None else None
    if known is not None:
        return known
    if hurry and profile_cache is not None:
        predicted = profile_cache.predict_profile(_model_key(stage, block_size), stage.step_bytes)
        if predicted is not None:
            log.info(
                "not measured for now: one decode row should take %.1f ms, as other layers do",
                1e3 * predicted.decode_s(1),
            )
            return predicted
    begin = time.perf_counter()
    with StagePasses(stage, kv_bytes, block_size) as passes:
        profile = measure_profile(passes, time.perf_counter, seconds)
    log.info(
        "measured in %.1f s: one decode row takes %.1f ms, a chunk of %d rows %.1f ms, tile %d",
        time.perf_counter() - begin,
        1e3 * profile.decode_s(1),
        profile.prefill[-1][0],
        1e3 * profile.prefill[-1][1],
        profile.tile,
    )
    if profile_cache is not None:
        profile_cache.store_profile(key, profile, _model_key(stage, block_size), stage.step_bytes)
    return profile


def profile_key(stage: Stage, block_size: int) -> str:
    """Everything that a stage's times depend on; of the model its shape, not its weights.

    The bytes of its weights tell apart how they are quantized.
    """
    first, last = stage.layers
    return f"{_model_key(stage, block_size)}; layers {first}:{last}, {stage.weight_bytes} bytes"


def _model_key(stage: Stage, block_size: int) -> str:
    """All of a key that other layers of the same model have in common, on the same device."""
    on_cpu = stage.device.type == "cpu"
    threads = torch.get_num_threads() if on_cpu else 0
    parts = (
        f"format {_FORMAT_VERSION}",
        f"molink {molink.__version__}",
        f"torch {torch.__version__}",
        f"{stage.device.type} {describe_device(stage.device)}, {threads} threads",
        f"{stage.dtype}, travels as {stage.wire_dtype}, {stage.layer_bytes} bytes a layer",
        f"blocks of {block_size}",
        repr(stage.config),
        *(f"without {name}" for name in sorted(stage.disabled_kernels)),
    )
    return "; ".join(parts)


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
