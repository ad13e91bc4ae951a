"""The profile of a loaded stage: cached or measured."""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import molink
from molink.facts.profile import Profile
from molink.stage.diagnostics.device_names import describe_device, describe_instructions
from molink.stage.diagnostics.profile_cache import ProfileCache
from molink.stage.diagnostics.stage_passes import StagePasses
from molink.stage.diagnostics.timing import measure_profile
from molink.stage.stage import Stage

log = logging.getLogger(__name__)

#: Maximum seconds of measuring; on a very slow stage only the smallest passes are measured.
MAX_PROFILING_S = 3.0
#: Runs of MTP, and the minimum seconds of one, since 0 means that there is no MTP.
_MTP_RUNS, _MIN_S = 5, 1e-6
#: Version of profiles; increment it when measuring or kernels outside the key change.
_FORMAT_VERSION = 7


def profile_stage(
    stage: Stage,
    kv_bytes: int,
    block_size: int,
    cache: Path | None = None,
    seconds: float = MAX_PROFILING_S,
    *,
    hurry: bool = False,
) -> Profile:
    """Return ``T_d`` and ``T_p`` of ``stage``, cached in the folder ``cache``.

    In a ``hurry`` it is scaled from the profile of other layers of the same model by bytes of
    weights, and not cached. Measuring replaces the stage's KV pool by one of up to ``kv_bytes``.

    Raises:
        MemoryError: not even a single row fits.
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
                "profile scaled from other layers: one decode row should take %.1f ms",
                1e3 * predicted.decode_s(1),
            )
            # The other profile may lack MTP, which only the last stage has.
            layers = stage.layers[1] - stage.layers[0] + 2
            mtp_s = predicted.decode_s(1) / layers if stage.has_mtp else 0.0
            return msgspec.structs.replace(predicted, mtp_s=mtp_s)
    begin = time.perf_counter()
    with StagePasses(stage, kv_bytes, block_size) as passes:
        passes.capture_graphs()
        measured = measure_profile(passes, time.perf_counter, seconds, _pass_timer(stage))
        mtp_s = _time_mtp(passes, _pass_timer(stage)) if stage.has_mtp else 0.0
    profile = msgspec.structs.replace(measured, interleaves=stage.interleaves, mtp_s=mtp_s)
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


def _time_mtp(passes: StagePasses, timer: Callable[[], float]) -> float:
    """Measure the seconds of one MTP prediction; the fastest of a few runs counts."""
    taken = []
    for _ in range(_MTP_RUNS):
        begin = timer()
        passes.run_mtp()
        taken.append(timer() - begin)
    return max(_MIN_S, min(taken))


def profile_key(stage: Stage, block_size: int) -> str:
    """Return a key of everything that a stage's times depend on: shapes, not weights.

    Bytes of weights identify the quantization.
    """
    first, last = stage.layers
    return f"{_model_key(stage, block_size)}; layers {first}:{last}, {stage.weight_bytes} bytes"


def _pass_timer(stage: Stage) -> Callable[[], float]:
    """Return the clock for passes: on a CPU the thread's CPU time, which excludes other programs.

    On Windows it is the wall clock, since CPU time advances in steps longer than a pass.
    """
    counts_cpu_time = stage.device.type == "cpu" and sys.platform != "win32"
    return time.thread_time if counts_cpu_time else time.perf_counter


def _model_key(stage: Stage, block_size: int) -> str:
    """Return the part of a key that all layers of the same model share."""
    on_cpu = stage.device.type == "cpu"
    threads = torch.get_num_threads() if on_cpu else 0
    parts = (
        f"format {_FORMAT_VERSION}",
        f"molink {molink.__version__}",
        f"torch {torch.__version__}",
        f"{stage.device.type} {describe_device(stage.device)}{describe_instructions(stage.device)}",
        f"{threads} threads",
        f"{stage.dtype}, wire {stage.wire_dtype}, {stage.layer_bytes} bytes a layer",
        f"KV {stage.kv_cache_dtype}",
        f"blocks of {block_size}",
        repr(stage.config),
        *(f"without {name}" for name in sorted(stage.disabled_kernels)),
        *([f"{stage.host_experts} experts of a layer on the CPU"] if stage.host_experts else ()),
    )
    return "; ".join(parts)
