"""Tests a stage's kernels on its device, and disables wrong and slow ones.

Results are cached in a file, valid for one device, driver, torch, Triton and molink version.
"""

import contextlib
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch

import molink
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import UsageError
from molink.facts.dtypes import DTypeChoice
from molink.facts.kernels import FALLBACKS, KernelName
from molink.facts.model import Quantize
from molink.files import retry_while_busy
from molink.stage.diagnostics.device_names import (
    describe_device,
    describe_instructions,
    driver_version,
)
from molink.stage.diagnostics.kernel_trials import (
    NO_MEMORY,
    KernelChain,
    KernelTrial,
    integer_chains,
    kernel_chains,
    memory_trials,
    quantized_forms,
)
from molink.stage.diagnostics.trial_shapes import TrialShapes
from molink.stage.gpu_kernels.triton_support import describe_triton
from molink.stage.torch_dtypes import choose_dtype

log = logging.getLogger(__name__)

#: Version of the trials; increment it with every change.
_FORMAT_VERSION = 11
_MAX_BYTES, _MAX_RESULTS = 1 << 19, 512
#: Starts without a result after which a trial is assumed to crash the process.
_MAX_STARTS = 2

#: Shapes of :func:`~molink.stage.diagnostics.kernel_trials.memory_trials`.
_USUAL = "usual"

_CheckState = Literal["ok", "absent", "wrong", "slow"]


class _CheckResult(msgspec.Struct, frozen=True):
    """``num_starts`` counts starts without a result."""

    state: _CheckState | None = None
    reason: Annotated[str, msgspec.Meta(max_length=512)] = ""
    num_starts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0


class _ChecksFile(msgspec.Struct, frozen=True, kw_only=True):
    """``environment`` identifies everything that results depend on."""

    environment: str
    results: dict[str, _CheckResult]


class KernelChecks:
    """Cached results of trials on one device.

    An unreadable or foreign file counts as empty, and failing to write is not an error.
    """

    def __init__(self, path: Path, about: str) -> None:
        self._path, self._environment = path, about
        self._results = self._read_results()

    def check_kernel(self, trial: KernelTrial, shapes: str) -> _CheckResult:
        """Return the result of a trial with ``shapes``, running it unless cached."""
        key = f"{trial.kernel} {trial.dtype} {shapes}"
        known = self._results.get(key, _CheckResult())
        if known.state is not None:
            return known
        if known.num_starts >= _MAX_STARTS:
            return _CheckResult("wrong", "it crashes the process")
        # Recorded first, to detect crashes.
        self._store_result(key, _CheckResult(num_starts=known.num_starts + 1))
        outcome = trial.run_trial()
        off = "" if outcome["error"] is None else f"it is off by {outcome['error']:.2g}"
        found = _CheckResult(outcome["state"], outcome["reason"] or off)
        self._store_result(key, _CheckResult() if found.reason.startswith(NO_MEMORY) else found)
        return found

    def has_passed(self, trial: KernelTrial, shapes: str) -> bool:
        """Whether a kernel works with ``shapes``, isn't slow, and never failed with others."""
        failed = any(
            key.partition(" ")[0] == trial.kernel
            and (result.state in ("wrong", "slow") or result.num_starts >= _MAX_STARTS)
            for key, result in self._results.items()
        )
        if failed or self.check_kernel(trial, shapes).state != "ok":
            return False
        return not self.is_slow(trial)

    def is_slow(self, trial: KernelTrial) -> bool:
        """Return whether a correct kernel crashes or is slower than its fallback.

        Results are cached because timing takes seconds on a busy CPU, and because all stages of a
        PC must agree: weights of a disabled kernel may take twice the memory.
        """
        if trial.is_slow is None:
            return False
        key = f"{trial.kernel} {trial.dtype} speed"
        known = self._results.get(key, _CheckResult())
        if known.state is None:
            if known.num_starts >= _MAX_STARTS:
                return True
            # Recorded first, to detect crashes.
            self._store_result(key, _CheckResult(num_starts=known.num_starts + 1))
            known = _CheckResult("slow" if trial.is_slow() else "ok")
            self._store_result(key, known)
        return known.state == "slow"

    def _store_result(self, key: str, result: _CheckResult) -> None:
        self._results.pop(key, None)
        self._results[key] = result
        for oldest in list(self._results)[:-_MAX_RESULTS]:
            del self._results[oldest]
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            draft.write_bytes(
                msgspec.json.encode(
                    _ChecksFile(environment=self._environment, results=self._results)
                )
            )
            retry_while_busy(lambda: draft.replace(self._path))
        except OSError as error:
            log.warning("can't store results of kernel trials in %s: %s", self._path, error)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _read_results(self) -> dict[str, _CheckResult]:
        try:
            if self._path.stat().st_size > _MAX_BYTES:
                return {}
            kept = msgspec.json.decode(self._path.read_bytes(), type=_ChecksFile)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("ignoring %s, kernels are tested again: %s", self._path, error)
            return {}
        return kept.results if kept.environment == self._environment else {}


def describe_environment(device: torch.device) -> str:
    """Describe everything but its inputs that a kernel's results depend on."""
    on_cpu = device.type == "cpu"
    threads = torch.get_num_threads() if on_cpu else 0
    driver = "" if on_cpu else f", {describe_triton()}, driver {driver_version()}"
    return (
        f"format {_FORMAT_VERSION}; molink {molink.__version__}; torch "
        f"{torch.__version__}{driver}; "
        f"{device.type} {describe_device(device)}{describe_instructions(device)}, {threads} threads"
    )


def check_kernels(
    path: Path,
    folder: ModelFolder,
    device: torch.device,
    dtype: DTypeChoice,
    quantize: Quantize,
    block_size: int,
    disabled_kernels: Collection[str] = (),
) -> tuple[str, ...]:
    """Test a stage's kernels; return ``disabled_kernels`` and all that fail or are slow.

    Raises:
        UsageError: no correct kernel is left for some purpose.
    """
    config = folder.config
    computed = choose_dtype(dtype, config.dtype, device)
    mode = quantize if config.quantized == "none" else config.quantized
    shapes = TrialShapes.from_config(config, block_size, device, folder.tensors)
    checks = KernelChecks(path, describe_environment(device))
    avoided = dict.fromkeys(disabled_kernels)
    chains = kernel_chains(shapes, computed, mode, device)
    if dtype == "auto" and device.type == "cpu":
        quantized = quantized_forms(mode, shapes.products, on_gpu=False)
        formats = dict.fromkeys((*shapes.formats, *(form for form, _ in quantized)))
        chains = (*chains, *integer_chains(tuple(formats), computed))
    for chain in chains:
        for kernel in _find_failing(chain, checks, repr(shapes), avoided, device):
            avoided[kernel] = None
    return tuple(avoided)


def find_proven_kernels(path: Path, device: torch.device) -> tuple[KernelName, ...]:
    """Return a GPU's kernels that memory plans may rely on: they pass, and failed with no model.

    Attention kernels are tested with the page size that they need: ``flash-attention`` has its own,
    ``triton-attention`` supports any. All other kernels are unknown until a stage checks its own
    shapes.
    """
    checks = KernelChecks(path, describe_environment(device))
    return tuple(
        trial.kernel for trial in memory_trials(device) if checks.has_passed(trial, _USUAL)
    )


def _find_failing(
    chain: KernelChain,
    checks: KernelChecks,
    shapes: str,
    disabled_kernels: Collection[str],
    device: torch.device,
) -> list[str]:
    """Return and log failing and slow kernels of a chain, up to the first that works.

    Raises:
        UsageError: all fail.
    """
    failing: list[str] = []
    for trial in chain:
        if trial.kernel in disabled_kernels:
            continue
        result = checks.check_kernel(trial, shapes)
        if result.state == "ok":
            if not checks.is_slow(trial):
                return failing
            log.info(
                "%s (%s) is slower here: using %s",
                trial.kernel,
                trial.dtype,
                FALLBACKS[trial.kernel],
            )
            failing.append(trial.kernel)
            continue
        if result.state == "absent":
            log.info("no %s on %s: %s", trial.kernel, device, result.reason)
            continue
        if trial.kernel not in FALLBACKS:
            raise UsageError(
                f"{device} ({describe_device(device)}) computes wrongly, and nothing can replace "
                f"{trial.kernel} ({trial.dtype}): {result.reason}. See `molink doctor`; exclude "
                "this device with --device cpu or --stage none"
            )
        log.warning(
            "%s (%s) fails on this %s: %s. Using %s instead; `molink doctor` tests it again",
            trial.kernel,
            trial.dtype,
            describe_device(device),
            result.reason,
            FALLBACKS[trial.kernel],
        )
        failing.append(trial.kernel)
    return failing
