"""Measures this PC's device in a subprocess and caches the result.

The daemon never imports torch: :mod:`molink.stage.diagnostics.device` runs once per device, torch
version and thread count.
"""

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from molink.cpu_isa import avx2_only
from molink.errors import WorkerError
from molink.facts.device import Device, ExpertHost
from molink.facts.dtypes import DTypeChoice, NarrowDType
from molink.facts.footprint import StageSetup, StepLimits, host_setup
from molink.facts.kernels import KernelName
from molink.facts.model import KVCacheDType, Quantize
from molink.facts.profile import MAX_CHUNK_ROWS
from molink.facts.settings import PipelineSettings
from molink.wire.sockets.secrets import write_secret
from molinkd.child_process import FIRST_WINDOWS_CODE, exit_text
from molinkd.peer.settings import AUTO_EXPERT_MEMORY, MemoryShare, Settings
from molinkd.platform import child_options, num_cores

log = logging.getLogger(__name__)

PROBE_COMMAND = (sys.executable, "-P", "-m", "molink.stage.diagnostics.device")
#: The first one on a GPU compiles kernels.
_TIMEOUT_S = 600.0
#: A kernel that ends the process is left out by the third one.
_MAX_ATTEMPTS = 3
#: Fraction of memory for stages if `memory` is not set; the CPU's is shared with other programs.
_CPU_SHARE = 0.5
_CUDA_SHARE = 0.9
#: Fraction of free host memory for experts with ``auto``.
_FREE_HOST_SHARE = 0.75
#: Bytes that a CUDA context and its libraries use per stage.
_CUDA_CONTEXT_BYTES = 1 << 30


class DeviceProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Output of :mod:`molink.stage.diagnostics.device`.

    Memory is in bytes, ``read_rate`` in bytes/s.
    """

    kind: Literal["cpu", "cuda"]
    index: int
    name: str
    total: int
    free: int
    read_rate: float
    bf16: bool
    blocks: bool = False
    reads_pages: bool = False
    narrow: tuple[NarrowDType, ...] = ()
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    threads: int
    instructions: str
    torch: str
    #: Number of CUDA devices of this PC.
    gpus: int = 0
    #: The CPU beside a GPU, if experts may lie in its memory.
    host: "DeviceProbe | None" = None


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """The device as reported to the coordinator, and whether it has native bf16."""

    device: Device
    bf16: bool
    #: Number of CUDA devices of this PC.
    gpus: int = 0

    @property
    def name(self) -> str:
        """The torch device name."""
        return "cpu" if self.device.kind == "cpu" else f"cuda:{self.device.index}"

    def stage_setup(
        self,
        settings: PipelineSettings,
        dtype: DTypeChoice,
        quantize: Quantize = "none",
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> StageSetup:
        """The setup of a stage on this device."""
        return StageSetup(
            kind=self.device.kind,
            bf16=self.bf16,
            has_block_kernels=self.device.has_block_kernels,
            narrow_dtypes=self.device.narrow_dtypes,
            reads_pages=self.device.reads_pages,
            dtype=dtype,
            quantize=quantize,
            kv_cache_dtype=kv_cache_dtype,
            step_limits=StepLimits(
                settings.max_num_batched_tokens or MAX_CHUNK_ROWS, settings.max_num_seqs
            ),
            host=host_setup(self.device.expert_host, self.device.kind, dtype, quantize),
        )

    @property
    def required_kernels(self) -> tuple[KernelName, ...]:
        """Kernels without which a stage needs more memory than its setup says."""
        found: list[KernelName] = ["gguf-blocks"] if self.device.has_block_kernels else []
        return (*found, "triton-attention") if self.device.reads_pages else tuple(found)

    def without_kernels(self, failed: Collection[str]) -> "MeasuredDevice":
        """The device as it is if these kernels don't work."""
        device = self.device
        changed = msgspec.structs.replace(
            device,
            has_block_kernels=device.has_block_kernels and "gguf-blocks" not in failed,
            reads_pages=device.reads_pages and "triton-attention" not in failed,
            block_size=1 if "flash-attention" in failed else device.block_size,
        )
        return replace(self, device=changed)


class _CachedProbe(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    probe: DeviceProbe


def num_worker_threads(settings: Settings) -> int:
    """Compute threads per stage on the CPU, at least 1."""
    return settings.threads or max(1, num_cores() // settings.stages_per_host)


async def measure_device(
    settings: Settings,
    cache: Path,
    command: Sequence[str] = PROBE_COMMAND,
    kernel_checks: Path | None = None,
) -> MeasuredDevice:
    """Measure this PC's device, including the memory that stages may use.

    ``kernel_checks`` is the file that keeps the results of a GPU's kernel checks.

    Raises:
        WorkerError: The measurement failed; the message quotes its last line.
    """
    threads = num_worker_threads(settings)
    mbytes = 256 if settings.stages_per_host == 1 else 32
    key = f"{settings.device} {threads} threads {mbytes} MB torch {torch_version()} instructions"
    key += " avx2" * avx2_only()
    probe = _read_cache(cache, key)
    if probe is None or probe.kind == "cuda":  # free GPU memory changes
        arguments = ["--device", settings.device, "--threads", str(threads)]
        arguments += ["--mbytes", str(mbytes)]
        if settings.expert_memory:
            arguments.append("--host")
        if kernel_checks is not None:
            arguments += ["--kernel-checks", str(kernel_checks)]
        probe = await _run_probe([*command, *arguments])
        body = msgspec.json.encode(_CachedProbe(key=key, probe=probe))
        write_secret(cache, body.decode("utf-8"))
    return MeasuredDevice(describe_probed_device(settings, probe), probe.bf16, probe.gpus)


def read_measured_device(settings: Settings, cache: Path) -> Device | None:
    """The device as it was measured last; ``None`` if it never was. Measures nothing."""
    try:
        found = msgspec.json.decode(cache.read_bytes(), type=_CachedProbe)
    except (OSError, msgspec.MsgspecError):
        return None
    return describe_probed_device(settings, found.probe)


def describe_probed_device(settings: Settings, probe: DeviceProbe) -> Device:
    """The device as reported to the coordinator."""
    return Device(
        kind=probe.kind,
        index=probe.index,
        name=probe.name[:256],
        memory=stage_memory_budget(settings, probe),
        read_rate=probe.read_rate,
        instructions=probe.instructions[:256],
        threads=probe.threads if probe.kind == "cpu" else 0,
        bf16=probe.bf16,
        has_block_kernels=probe.blocks,
        reads_pages=probe.reads_pages,
        narrow_dtypes=probe.narrow,
        block_size=probe.block_size,
        expert_host=_describe_expert_host(settings, probe),
    )


def _describe_expert_host(settings: Settings, probe: DeviceProbe) -> ExpertHost | None:
    """Host memory that experts of one stage may use; a CPU's experts lie beside its stage."""
    host = probe if probe.kind == "cpu" else probe.host
    asked = settings.expert_memory
    if not asked or host is None:
        return None
    if isinstance(asked, MemoryShare):
        asked = int(host.total * asked.percent / 100)
    elif asked == AUTO_EXPERT_MEMORY:
        free = int(host.free * _FREE_HOST_SHARE) // settings.stages_per_host
        asked = max(0, free - stage_memory_budget(settings, probe) * (probe.kind == "cpu"))
    return ExpertHost(
        memory=min(asked, host.total),
        read_rate=host.read_rate,
        bf16=host.bf16,
        narrow_dtypes=host.narrow,
        has_block_kernels=host.blocks,
    )


def stage_memory_budget(settings: Settings, probe: DeviceProbe) -> int:
    """Bytes of the device that one stage of this daemon may use.

    On a GPU, the CUDA context is subtracted even from an explicit `memory`.
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
    for _ in range(_MAX_ATTEMPTS):
        code, output, errors = await _communicate(command)
        if 0 <= code < FIRST_WINDOWS_CODE:
            break
        log.warning("measuring the device %s", exit_text(code))
    return _parse_probe(code, output, errors)


async def _communicate(command: Sequence[str]) -> tuple[int, bytes, bytes]:
    process = _start_probe(command)
    # The thread can't be cancelled; it returns when the process is killed.
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
    return process.returncode, output, errors


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
                "torch is the CPU build, so CUDA devices are unavailable: run `molink setup --cuda`"
            )
        if lines and "No module named 'torch'" in lines[-1]:
            raise WorkerError(
                "torch is not installed, so this PC can't hold layers: run `molink setup`"
            )
        raise WorkerError(f"can't measure the device: {lines[-1] if lines else 'no message'}")
    try:
        return msgspec.json.decode(output.strip().splitlines()[-1], type=DeviceProbe)
    except (msgspec.MsgspecError, IndexError) as error:
        raise WorkerError(f"the device measurement is invalid: {error}") from error


def torch_version() -> str:
    """The installed torch version, or ``none``; reading it imports neither torch nor metadata."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "none"
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return "none" if found is None else found[1]
