"""Benchmarks a stage in a subprocess; the daemon never imports torch."""

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
#: Upper bound, loading included, in seconds.
_TIMEOUT_S = 3600.0
#: Length of one wait in seconds: Windows delivers Ctrl-C only between waits.
_WAIT_S = 0.5


class BenchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a pass with ``rows`` rows."""

    rows: int
    seconds: float
    tokens_per_s: float


class ReadRate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes read per decode row and the rate, compared with the device's peak."""

    bytes: int
    bytes_per_s: float
    peak_bytes_per_s: float
    share: float


class ComputeRate(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of the best chunk and their rate, compared with the device's peak."""

    rows: int
    flops: int
    flops_per_s: float
    peak_flops_per_s: float
    share: float


class StageBenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Output of :mod:`molink.stage.diagnostics.stage_bench`, with the model's name."""

    model: str = ""
    layers: LayerRange
    device: str
    device_name: str
    threads: int
    torch: str
    dtype: str
    quantize: str
    kv_cache_dtype: str = "auto"
    weight_bytes: int
    host_expert_bytes: int = 0
    decode: tuple[BenchPoint, ...]
    prefill: tuple[BenchPoint, ...]
    context: int
    #: Seconds of a decode row per token before it.
    decode_token_s: float = 0.0
    tile: int
    read: ReadRate
    compute: ComputeRate


@dataclass(frozen=True, slots=True)
class StageBench:
    """What to benchmark. ``threads`` 0 is torch's default; ``seconds`` limits the measuring."""

    folder: Path
    layers: LayerRange
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    kv_cache_dtype: str = "auto"
    host_experts: int = 0
    threads: int = 0
    seconds: float = 20.0

    def build_arguments(self) -> list[str]:
        """Command-line arguments of the benchmark process."""
        given = {
            "--model-dir": self.folder,
            "--first": self.layers[0],
            "--last": self.layers[1],
            "--device": self.device,
            "--dtype": self.dtype,
            "--quantize": self.quantize,
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--host-experts": self.host_experts,
            "--threads": self.threads,
            "--seconds": self.seconds,
        }
        return [text for name, value in given.items() for text in (name, str(value))]


def measure_stage(order: StageBench, command: Sequence[str] = BENCH_COMMAND) -> StageBenchResult:
    """Run the benchmark and wait for it; Ctrl-C stops it.

    Raises:
        UsageError: The device does not exist or does not support the options.
        WorkerError: The benchmark failed; the message quotes its last line.
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
    """The output of a process, once it has exited."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return process.communicate(timeout=_WAIT_S)
        except subprocess.TimeoutExpired:  # the next wait continues where this one stopped
            if time.monotonic() >= deadline:
                raise


def _parse(code: int, output: bytes, errors: bytes) -> StageBenchResult:
    if code:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise _error_of(code, lines[-1] if lines else f"no message, exit code {code}")
    try:
        return msgspec.json.decode(output.strip().splitlines()[-1], type=StageBenchResult)
    except (msgspec.MsgspecError, IndexError) as error:
        raise WorkerError(f"the stage measurement is invalid: {error}") from error


def _error_of(code: int, line: str) -> MolinkError:
    if "not compiled with CUDA" in line or "this torch sees no such GPU" in line:
        return UsageError(
            "torch finds no such GPU: check `nvidia-smi`, and run `molink setup --cuda` if torch "
            "is the CPU build"
        )
    if code == UsageError.exit_code:
        return UsageError(line)
    return WorkerError(f"can't measure the stage: {line}")
