"""What a stage uses is tried on its device first; what is wrong there is left out.

Results are kept in a file, for one device, driver, torch and molink, and trusted for just these.
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
from molink.checkpoint.config import ModelConfig
from molink.errors import UsageError
from molink.facts.dtypes import DTypeChoice
from molink.facts.kernels import FALLBACKS
from molink.facts.model import Quantize
from molink.files import retry_while_busy
from molink.stage.diagnostics.device import describe_device, driver_version
from molink.stage.diagnostics.kernel_trials import KernelChain, KernelTrial, kernel_chains
from molink.stage.diagnostics.trial_shapes import TrialShapes
from molink.stage.torch_dtypes import choose_dtype

log = logging.getLogger(__name__)

#: Rises whenever kernels are tried in another way.
_FORMAT_VERSION = 2
_MAX_BYTES, _MAX_RESULTS = 1 << 19, 512
#: A trial that was begun so often and never ended has ended its process.
_MAX_STARTS = 2

_CheckState = Literal["ok", "absent", "wrong"]


class _CheckResult(msgspec.Struct, frozen=True):
    """``num_starts`` counts the starts of a trial that has no result yet."""

    state: _CheckState | None = None
    reason: Annotated[str, msgspec.Meta(max_length=512)] = ""
    num_starts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0


class _ChecksFile(msgspec.Struct, frozen=True, kw_only=True):
    """``environment`` is everything that a result depends on but the trial."""

    environment: str
    results: dict[str, _CheckResult]


class KernelChecks:
    """Results of trials on one device.

    A file that can't be read, or is about something else, is as good as none; nor does a folder
    that can't be written stop anybody.
    """

    def __init__(self, path: Path, about: str) -> None:
        self._path, self._environment = path, about
        self._results = self._read_results()

    def check_kernel(self, trial: KernelTrial, shapes: str) -> _CheckResult:
        """That of a trial with ``shapes``: known, or found out now."""
        key = f"{trial.kernel} {trial.dtype} {shapes}"
        known = self._results.get(key, _CheckResult())
        if known.state is not None:
            return known
        if known.num_starts >= _MAX_STARTS:
            return _CheckResult("wrong", "it ends the process")
        # Whoever comes after a crash is to know what was tried.
        self._store_result(key, _CheckResult(num_starts=known.num_starts + 1))
        told = trial.run_trial()
        off = "" if told["error"] is None else f"it is off by {told['error']:.2g}"
        found = _CheckResult(told["state"], told["reason"] or off)
        self._store_result(key, found)
        return found

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
            log.warning("can't keep what kernels were found to do in %s: %s", self._path, error)
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
            log.warning("ignoring %s, kernels are tried again: %s", self._path, error)
            return {}
        return kept.results if kept.environment == self._environment else {}


def describe_environment(device: torch.device) -> str:
    """What a kernel's results depend on but its inputs."""
    on_cpu = device.type == "cpu"
    threads = torch.get_num_threads() if on_cpu else 0
    driver = "" if on_cpu else f", driver {driver_version()}"
    return (
        f"format {_FORMAT_VERSION}; molink {molink.__version__}; torch "
        f"{torch.__version__}{driver}; "
        f"{device.type} {describe_device(device)}, {threads} threads"
    )


def check_kernels(
    path: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: DTypeChoice,
    quantize: Quantize,
    block_size: int,
    disabled_kernels: Collection[str] = (),
) -> tuple[str, ...]:
    """Kernels that a stage is to avoid: those that it was told to, and those that fail here.

    Raises:
        UsageError: nothing that computes rightly is left.
    """
    computed = choose_dtype(dtype, config.dtype, device)
    mode = quantize if config.quantized == "none" else config.quantized
    shapes = TrialShapes.from_config(config, block_size, device)
    checks = KernelChecks(path, describe_environment(device))
    avoided = dict.fromkeys(disabled_kernels)
    for chain in kernel_chains(shapes, computed, mode, device):
        for kernel in _find_failing(chain, checks, repr(shapes), avoided, device):
            avoided[kernel] = None
    return tuple(avoided)


def _find_failing(
    chain: KernelChain,
    checks: KernelChecks,
    shapes: str,
    disabled_kernels: Collection[str],
    device: torch.device,
) -> list[str]:
    """Kernels of a chain that fail, up to the first that works; says so.

    Raises:
        UsageError: all fail.
    """
    failing: list[str] = []
    for trial in chain:
        if trial.kernel in disabled_kernels:
            continue
        result = checks.check_kernel(trial, shapes)
        if result.state == "ok":
            return failing
        if result.state == "absent":
            log.info("no %s on %s: %s", trial.kernel, device, result.reason)
            continue
        if trial.kernel not in FALLBACKS:
            raise UsageError(
                f"{device} ({describe_device(device)}) computes wrongly, and nothing can take the "
                f"place of {trial.kernel} ({trial.dtype}): {result.reason}. See `molink doctor`; "
                "--device cpu or --stage none leaves this device out"
            )
        log.warning(
            "%s (%s) fails on this %s: %s. In its place: %s; `molink doctor` tries it again",
            trial.kernel,
            trial.dtype,
            describe_device(device),
            result.reason,
            FALLBACKS[trial.kernel],
        )
        failing.append(trial.kernel)
    return failing
