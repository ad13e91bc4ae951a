"""Tests the kernels of this PC's device in a subprocess and stores the result.

The daemon never imports torch: :mod:`molink.stage.diagnostics.parity` runs the trials. A kernel
that crashes the process has failed just like one that computes wrong values; the remaining kernels
are then tested without it.
"""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from molink.facts.kernels import FALLBACKS
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.agent.device_probe import torch_version
from molinkd.platform import child_options

log = logging.getLogger(__name__)

PARITY_COMMAND = (sys.executable, "-P", "-m", "molink.stage.diagnostics.parity")
_TIMEOUT_S = 120.0
_MAX_BYTES = 1 << 16

_ShortText = Annotated[str, msgspec.Meta(max_length=512)]


class TorchGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that torch can use."""

    name: _ShortText
    capability: _ShortText


class TorchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The installed torch. ``cuda`` is the version it was built for, ``None`` for a CPU build.

    ``reason`` says why it can't use a GPU, ``kernels_for`` lists its architectures (``sm_86``),
    ``triton_problem`` says why Triton can't compile kernels.
    """

    torch: _ShortText
    cuda: _ShortText | None = None
    gpus: tuple[TorchGpu, ...] = ()
    reason: _ShortText = ""
    kernels_for: tuple[_ShortText, ...] = ()
    triton_problem: _ShortText = ""


class KernelResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one kernel's trial in one dtype; see :mod:`molink.stage.diagnostics.parity`."""

    kernel: _ShortText
    dtype: _ShortText
    state: Literal["ok", "absent", "wrong"]
    error: float | None = None
    tolerance: float = 0.0
    reason: _ShortText = ""


class SelfTestResult(msgspec.Struct, frozen=True, kw_only=True):
    """All trials on one device. ``failure`` says why there are none."""

    about: TorchInfo | None = None
    device: _ShortText = ""
    name: _ShortText = ""
    results: tuple[KernelResult, ...] = ()
    failure: _ShortText = ""

    @property
    def failed_kernels(self) -> tuple[str, ...]:
        """Kernels that failed in any dtype."""
        return tuple(dict.fromkeys(one.kernel for one in self.results if one.state == "wrong"))

    @property
    def disabled_kernels(self) -> tuple[str, ...]:
        """Failed kernels that have a replacement."""
        return tuple(name for name in self.failed_kernels if name in FALLBACKS)


class _TrialStart(msgspec.Struct, frozen=True, kw_only=True):
    kernel: _ShortText
    dtype: _ShortText


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    about: TorchInfo | None = None
    device: _ShortText | None = None
    name: _ShortText = ""
    begin: _TrialStart | None = None
    result: KernelResult | None = None


class _StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    torch: _ShortText
    name: _ShortText
    avoid: tuple[_ShortText, ...]


def run_self_test(
    device: str,
    threads: int,
    command: Sequence[str] = PARITY_COMMAND,
    model: Path | None = None,
) -> SelfTestResult:
    """Test all kernels of ``device`` (``auto``, ``cpu`` or ``cuda:N``); takes some seconds.

    ``model`` is a folder with a ``config.json`` whose shapes are used.
    """
    failed: list[KernelResult] = []
    while True:
        skip = ",".join(one.kernel for one in failed)
        arguments = ["--device", device, "--threads", str(threads)]
        arguments += [] if model is None else ["--model", str(model)]
        arguments += ["--skip", skip]
        try:
            ending, output, errors = _run_process([*command, *arguments])
            read = [msgspec.json.decode(line, type=_Line) for line in output.splitlines()]
        except (OSError, msgspec.MsgspecError) as error:
            return SelfTestResult(failure=f"can't run the self-test: {error}"[:512])
        where = next((one for one in read if one.device is not None), _Line())
        results = [one.result for one in read if one.result is not None]
        started = [one.begin for one in read if one.begin is not None]
        if ending and len(started) > len(results) and started[-1].kernel not in skip.split(","):
            last, reason = started[-1], f"it crashes the process ({ending})"
            failed.append(
                KernelResult(kernel=last.kernel, dtype=last.dtype, state="wrong", reason=reason)
            )
            continue
        return SelfTestResult(
            about=next((one.about for one in read if one.about is not None), None),
            device=where.device or "",
            name=where.name,
            results=(*failed, *results),
            failure=(errors or ending)[-512:] if ending else "",
        )


def save_disabled_kernels(path: Path, tested: SelfTestResult) -> None:
    """Store the kernels that workers must not use; removes earlier results."""
    if tested.disabled_kernels:
        kept = _StoredResult(torch=torch_version(), name=tested.name, avoid=tested.disabled_kernels)
        write_secret(path, msgspec.json.encode(kept).decode("utf-8"))
    else:
        path.unlink(missing_ok=True)


def load_disabled_kernels(path: Path, name: str) -> tuple[str, ...]:
    """Stored kernels that are disabled on the device ``name`` with the installed torch."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return ()
        kept = msgspec.json.decode(path.read_bytes(), type=_StoredResult)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("ignoring %s: %s", path, error)
        return ()
    if (kept.torch, kept.name) != (torch_version(), name):
        return ()
    return tuple(one for one in kept.avoid if one in FALLBACKS)


def _run_process(command: Sequence[str]) -> tuple[str, bytes, str]:
    """The failure (empty if none), the output, and the last error line of the process.

    Raises:
        OSError: The process can't be started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **child_options(computes=True),
    ) as process:
        try:
            output, errors = process.communicate(timeout=_TIMEOUT_S)
            ending = _exit_text(process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            ending = f"no result within {_TIMEOUT_S:.0f} s"
        finally:
            process.kill()
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return ending, output, lines[-1] if lines else ""


def _exit_text(code: int) -> str:
    """An exit code in words; empty for success."""
    if code < 0:
        return f"signal {-code}"
    return (f"exit code {code:#x}" if code > 255 else f"exit code {code}") if code else ""
