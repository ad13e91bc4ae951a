"""Measures a stage in a process of its own: torch is never imported here."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from molink.errors import MolinkError, UsageError, WorkerError
from molink.facts.model import LayerRange
from molinkd.platform import child_options

BENCH_COMMAND = (sys.executable, "-P", "-m", "molink.stage.diagnostics.stage_bench")
#: Loading takes as long as it takes, but not for ever.
_TIMEOUT_S = 3600.0
#: Windows delivers Ctrl-C only between waits.
_WAIT_S = 0.5


class BenchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a pass of ``rows`` rows."""

    rows: int
    seconds: float
    tokens_per_s: float


class ReadRate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a single decode row reads, and how quickly, beside the device's best."""

    bytes: int
    bytes_per_s: float
    peak_bytes_per_s: float
    share: float


class ComputeRate(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of the best chunk, and how quick they are, beside the device's best."""

    rows: int
    flops: int
    flops_per_s: float
    peak_flops_per_s: float
    share: float


class StageBenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What :mod:`molink.stage.diagnostics.stage_bench` prints, with the model's name."""

    model: str = ""
    layers: LayerRange
    device: str
    device_name: str
    threads: int
    torch: str
    dtype: str
    quantize: str
    weight_bytes: int
    decode: tuple[BenchPoint, ...]
    prefill: tuple[BenchPoint, ...]
    context: int
    tile: int
    read: ReadRate
    compute: ComputeRate


@dataclass(frozen=True, slots=True)
class StageBench:
    """What to measure. ``threads`` 0 is torch's default; ``seconds`` bounds the measuring."""

    folder: Path
    layers: LayerRange
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    threads: int = 0
    seconds: float = 20.0

    def build_arguments(self) -> list[str]:
        """Of the process."""
        given = {
            "--model-dir": self.folder,
            "--first": self.layers[0],
            "--last": self.layers[1],
            "--device": self.device,
            "--dtype": self.dtype,
            "--quantize": self.quantize,
            "--threads": self.threads,
            "--seconds": self.seconds,
        }
        return [text for name, value in given.items() for text in (name, str(value))]


def measure_stage(order: StageBench, command: Sequence[str] = BENCH_COMMAND) -> StageBenchResult:
    """Run the measurement and wait for it; Ctrl-C ends it.

    Raises:
        UsageError: there is no such device, or it can't compute so.
        WorkerError: it failed; the message has its last line.
    """
    try:
        process = subprocess.Popen(
            [*command, *order.build_arguments()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **child_options(computes=True),
        )
    except OSError as error:
        raise WorkerError(f"can't measure the stage: {error}") from error
    with process:
        try:
            output, errors = _communicate(process)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"can't measure the stage: no result in {_TIMEOUT_S:.0f} s") from None
        finally:
            process.kill()
    return _parse(process.returncode, output, errors)


def _communicate(process: "subprocess.Popen[bytes]") -> tuple[bytes, bytes]:
    """What a process prints until it ends."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return process.communicate(timeout=_WAIT_S)
        except subprocess.TimeoutExpired:  # what has been read is kept for the next turn
            if time.monotonic() >= deadline:
                raise


def _parse(code: int, output: bytes, errors: bytes) -> StageBenchResult:
    if code:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise _error_of(code, lines[-1] if lines else f"no message, exit code {code}")
    try:
        return msgspec.json.decode(output.strip().splitlines()[-1], type=StageBenchResult)
    except (msgspec.MsgspecError, IndexError) as error:
        raise WorkerError(f"the measurement of the stage is unreadable: {error}") from error


def _error_of(code: int, line: str) -> MolinkError:
    if "not compiled with CUDA" in line or "this torch sees no such GPU" in line:
        return UsageError(
            "a cuda device can't be used: torch here sees no such GPU; see `nvidia-smi`, and run "
            "./install.sh --cuda if it has only the CPU build"
        )
    if code == UsageError.exit_code:
        return UsageError(line)
    return WorkerError(f"can't measure the stage: {line}")
