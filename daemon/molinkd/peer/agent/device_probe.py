"""What this PC's device can do, measured in a process of its own and remembered.

Torch is never imported here: the measurement is :mod:`molink.stage.diagnostics.device`, run once
for each device, torch version and thread count.
"""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from molink.errors import WorkerError
from molink.facts.device import Device
from molink.facts.dtypes import DTypeChoice, NarrowDType
from molink.facts.footprint import StageSetup, StepLimits
from molink.facts.model import Quantize
from molink.facts.profile import MAX_CHUNK_ROWS
from molink.facts.settings import PipelineSettings
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.settings import MemoryShare, Settings
from molinkd.platform import child_options, num_cores

log = logging.getLogger(__name__)

PROBE_COMMAND = (sys.executable, "-P", "-m", "molink.stage.diagnostics.device")
_TIMEOUT_S = 300.0
#: Part of the memory that stages may use where the user hasn't said: a CPU shares it with all else.
_CPU_SHARE = 0.5
_CUDA_SHARE = 0.9
#: What the CUDA context and its libraries take of each stage's memory, in bytes.
_CUDA_CONTEXT_BYTES = 1 << 30


class DeviceProbe(msgspec.Struct, frozen=True, kw_only=True):
    """What :mod:`molink.stage.diagnostics.device` prints; memory in bytes, ``read_rate`` in
    bytes/s."""

    kind: Literal["cpu", "cuda"]
    index: int
    name: str
    total: int
    free: int
    read_rate: float
    bf16: bool
    blocks: bool = False
    narrow: tuple[NarrowDType, ...] = ()
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    threads: int
    torch: str
    #: CUDA devices that this PC has.
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """The device as the coordinator gets it, and whether it computes in bf16 natively."""

    device: Device
    bf16: bool
    #: CUDA devices of the whole PC.
    gpus: int = 0

    @property
    def name(self) -> str:
        """As torch calls it."""
        return "cpu" if self.device.kind == "cpu" else f"cuda:{self.device.index}"

    def stage_setup(
        self, settings: PipelineSettings, dtype: DTypeChoice, quantize: Quantize = "none"
    ) -> StageSetup:
        """How a stage would run here."""
        return StageSetup(
            kind=self.device.kind,
            bf16=self.bf16,
            has_block_kernels=self.device.has_block_kernels,
            narrow_dtypes=self.device.narrow_dtypes,
            dtype=dtype,
            quantize=quantize,
            step_limits=StepLimits(
                settings.max_num_batched_tokens or MAX_CHUNK_ROWS, settings.max_num_seqs
            ),
        )


class _CachedProbe(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    probe: DeviceProbe


def num_worker_threads(settings: Settings) -> int:
    """Compute threads of one stage on this PC's CPU, at least 1."""
    return settings.threads or max(1, num_cores() // settings.stages_per_host)


async def measure_device(
    settings: Settings, cache: Path, command: Sequence[str] = PROBE_COMMAND
) -> MeasuredDevice:
    """This PC's device, with the memory that stages may use.

    Raises:
        WorkerError: the measurement failed; the message has its last line.
    """
    threads = num_worker_threads(settings)
    mbytes = 256 if settings.stages_per_host == 1 else 32
    key = f"{settings.device} {threads} threads {mbytes} MB torch {torch_version()} narrow"
    probe = _read_cache(cache, key)
    if probe is None or probe.kind == "cuda":  # what is free there changes
        arguments = ["--device", settings.device, "--threads", str(threads)]
        arguments += ["--mbytes", str(mbytes)]
        probe = await _run_probe([*command, *arguments])
        body = msgspec.json.encode(_CachedProbe(key=key, probe=probe))
        write_secret(cache, body.decode("utf-8"))
    device = Device(
        kind=probe.kind,
        index=probe.index,
        name=probe.name[:256],
        memory=stage_memory_budget(settings, probe),
        read_rate=probe.read_rate,
        bf16=probe.bf16,
        has_block_kernels=probe.blocks,
        narrow_dtypes=probe.narrow,
        block_size=probe.block_size,
    )
    return MeasuredDevice(device, probe.bf16, probe.gpus)


def stage_memory_budget(settings: Settings, probe: DeviceProbe) -> int:
    """Bytes of the device that one stage of this daemon may use.

    On a GPU a stage gets what the CUDA context leaves, however much it was promised.
    """
    asked = settings.memory
    if isinstance(asked, MemoryShare):
        asked = int(probe.total * asked.percent / 100)
    if asked:
        return min(asked, max(0, probe.total - _CUDA_CONTEXT_BYTES * (probe.kind == "cuda")))
    if probe.kind == "cpu":
        return int(probe.total * _CPU_SHARE) // settings.stages_per_host
    usable = min(int(probe.total * _CUDA_SHARE), probe.free)
    return max(0, usable // settings.stages_per_host - _CUDA_CONTEXT_BYTES)


def _read_cache(path: Path, key: str) -> DeviceProbe | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_CachedProbe)
    except (OSError, msgspec.MsgspecError):
        return None
    return found.probe if found.key == key else None


async def _run_probe(command: Sequence[str]) -> DeviceProbe:
    process = _start_probe(command)
    # A thread can't be cancelled, but it ends with the process that it waits for.
    with process:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                output, errors = await asyncio.to_thread(process.communicate)
        except TimeoutError:
            raise WorkerError(
                f"can't measure the device: no result within {_TIMEOUT_S:.0f} s"
            ) from None
        finally:
            process.kill()
    return _parse_probe(process.returncode, output, errors)


def _start_probe(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **child_options(computes=True),
        )
    except OSError as error:
        raise WorkerError(f"can't measure the device: {error}") from error


def _parse_probe(code: int, output: bytes, errors: bytes) -> DeviceProbe:
    if code:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        if lines and "not compiled with CUDA" in lines[-1]:
            raise WorkerError(
                "a cuda device can't be used: torch here is the CPU build; run ./install.sh --cuda"
            )
        raise WorkerError(f"can't measure the device: {lines[-1] if lines else 'no message'}")
    try:
        return msgspec.json.decode(output.strip().splitlines()[-1], type=DeviceProbe)
    except (msgspec.MsgspecError, IndexError) as error:
        raise WorkerError(f"the measurement of the device is unreadable: {error}") from error


def torch_version() -> str:
    """The version of torch that is installed; ``none`` if none is."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"
