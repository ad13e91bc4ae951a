"""A pretend ``cuda:0`` for a torch without CUDA: host memory behind CUDA's dispatch key.

Run as ``python -m tests.support.fake_cuda LIBRARY FOLDER EXPERTS`` in a process that
does nothing else; see ``tests/stage/test_pretend_cuda.py``. Every operator
runs by the CPU's, operands of mixed devices are refused, and waits of the host are counted. It does
not show graphs (the work itself is run), flash kernels (a plain reference), streams, pinning or
speed.
"""

import ctypes
import json
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.dtypes import WeightDType
from molink.facts.model import Quantize
from molink.stage import stage as stages
from molink.stage.attention import backend_check as trial
from molink.stage.attention import flash
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.decoder import expert_use
from molink.stage.device_copy import has_pinned
from molink.stage.diagnostics import kernel_trials as trials
from molink.stage.diagnostics.kernel_checks import find_proven_kernels
from molink.stage.diagnostics.parity import run_trials as all_trials
from molink.stage.diagnostics.stage_passes import StagePasses
from molink.stage.diagnostics.trial_shapes import TrialShapes
from molink.stage.sampling.sampler import SampleRow, sample_tokens
from molink.stage.stage import Stage
from molink.wire.messages.data_plane import SamplingParams
from tests.support.stage import varlen_attn

SOURCE = Path(__file__).with_name("pretend_cuda.cpp")
CUDA = torch.device("cuda", 0)
#: Prompts, prompts beside decode rows, and decode rows alone, often enough for graphs; then with
#: drafts.
MIXES = (
    (SequenceRows(0, 5, (0, 3)), SequenceRows(0, 3, (1, 4)), SequenceRows(0, 9, (2, 5))),
    (SequenceRows(5, 3, (0, 3)), SequenceRows(3, 1, (1, 4)), SequenceRows(9, 1, (2, 5))),
    *(
        tuple(SequenceRows(start + step, 1, (n, n + 3)) for n, start in enumerate((8, 4, 10)))
        for step in range(4)
    ),
    *(
        tuple(
            SequenceRows(start + count * step, count, (n, n + 3))
            for n, (start, count) in enumerate(((12, 4), (8, 1), (14, 2)))
        )
        for step in range(4)
    ),
)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "any token": SamplingParams(temperature=1.0, seed=1),
    "top_p": SamplingParams(temperature=0.6, top_p=0.9, seed=1),
    "top_k and logprobs": SamplingParams(temperature=0.8, top_k=500, seed=1, logprobs=5),
    "flat, with logprobs": SamplingParams(temperature=9.0, top_p=0.999, seed=1, logprobs=5),
}


def build(folder: Path) -> Path:
    """The library, for the torch that runs this; takes a minute.

    Raises:
        subprocess.CalledProcessError: the compiler can't make it.
    """
    from torch.utils import cpp_extension

    made = folder / "pretend_cuda.so"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = Path(torch.__file__).parent / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", abi, *includes, str(SOURCE)]
    command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-o", str(made)]
    subprocess.run(command, check=True)
    return made


class Host:
    """How often the host has read from the device since it was last asked."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self._counts = ctypes.CDLL(str(library))
        #: Reads by stand-ins.
        self.excused = 0
        #: Number of waits for the stream.
        self.synchronized = 0

    def synchronize(self) -> None:
        """Count a wait; replaces ``torch.cuda.Stream.synchronize``."""
        self.synchronized += 1

    def reads(self) -> int:
        """How often the host has waited: for a number, a tensor or all copies under way."""
        waited, self.excused, self.synchronized = self.synchronized - self.excused, 0, 0
        return int(self._counts.fc_scalars()) + int(self._counts.fc_d2h()) + waited

    def read_bytes(self) -> int:
        """Bytes of tensors that the host has read from the device since it was last asked."""
        return int(self._counts.fc_bytes())


class InlineWorker:
    """Stands in for ``CudaGraphCapturer``: each graph is the work, and faster."""

    nbytes = 0

    def __init__(self, device: torch.device) -> None:
        self._seconds = [2.0, 1.0]

    def capture_work(self, work: Any, max_bytes: int) -> Any:
        return work

    def time_work(self, work: Any) -> float:
        work()
        self._seconds.reverse()
        return self._seconds[1]


def kernel(host: Host, *given: Any, **named: Any) -> torch.Tensor:
    """The flash kernel by its documentation, computed on the host."""

    def here(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            assert value.device == CUDA, value.device
            host.excused += 1
            return value.cpu()
        return value

    named = {name: here(value) for name, value in named.items()}
    return varlen_attn(*map(here, given), **named).to(CUDA)


def install_fake(stack: ExitStack, host: Host, capability: tuple[int, int]) -> None:
    """Make torch report the card as present."""
    empty = torch.empty
    stream = SimpleNamespace(synchronize=host.synchronize)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    for place, name, stand_in in (
        (expert_use, "_MIN_EXCESS", 1),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "set_device", lambda _: None),
        (torch.cuda, "get_device_capability", lambda _: capability),
        (torch.cuda, "get_device_name", lambda _: "pretend"),
        (torch.cuda, "current_stream", lambda _: stream),
        (torch.cuda, "synchronize", lambda _: None),
        (torch.cuda, "Event", lambda: event),
        (torch.Tensor, "pin_memory", lambda tensor: tensor.clone()),
        (torch, "empty", lambda *given, pin_memory=False, **named: empty(*given, **named)),
        (stages, "CudaGraphCapturer", InlineWorker),
        (trials, "CudaGraphCapturer", InlineWorker),
        (trial, "find_kernel", lambda: partial(kernel, host)),
        (trials, "find_kernel", lambda: partial(kernel, host)),
    ):
        stack.enter_context(mock.patch.object(place, name, stand_in))


def compare(
    folder: ModelFolder,
    host: Host,
    dtype: WeightDType,
    quantize: Quantize,
    avoid: tuple[str, ...],
    host_experts: int = 0,
) -> dict[str, Any]:
    """Compare two stages on the card with two on the CPU, over the same rows.

    Of the card's experts, ``host_experts`` of each layer lie in host memory.
    """
    half, layers = folder.config.layers // 2, folder.config.layers
    size = 16 if "flash-attention" in avoid else flash.PAGE_MULTIPLE
    pairs: list[list[Stage]] = []
    for device in ("cuda:0", "cpu"):
        parts = ((0, half), (half, layers))
        moved = host_experts if device != "cpu" else 0
        pairs.append(
            [
                Stage.load_layers(
                    folder,
                    part,
                    device,
                    dtype,
                    quantize,
                    disabled_kernels=avoid,
                    host_experts=moved,
                )
                for part in parts
            ]
        )
        for stage in pairs[-1]:
            stage.allocate_kv_pool(8, size)
    worst, waits, swaps = 0.0, [], 0
    for mix in MIXES:
        count = sum(one.count for one in mix)
        tokens, results = torch.arange(count) + 20, []
        for first, last in pairs:
            host.reads()
            hidden = first.forward(StageInput(tokens, None, mix))
            waited = host.reads()
            rows = hidden.cpu()
            host.reads()
            logits = last.forward(StageInput(None, rows, mix, tuple(range(count))))
            waited += host.reads()
            results.append(logits.cpu())
            for stage in (first, last):
                # As while the stage is idle.
                stage.capture_next_graph()
                swaps += stage.swap_next_experts()
            if first.device == CUDA:
                assert logits.device == CUDA
                waits.append(waited)
        worst = max(worst, float((results[0] - results[1]).abs().max()))
    largest = float(results[1].abs().max())
    graphs = all(stage.has_graphs for stage in pairs[0])
    made = pairs[0][0]._graphs
    drafts = made is not None and made._plan.find_bucket(MIXES[-1]) in made._graphs
    backend = pairs[0][0]._attention_backend(size)
    told = {"graphs": graphs, "drafts": drafts}
    told["flash"] = isinstance(backend, flash.FlashAttention)
    return {"error": worst / largest, "waits": waits, "swaps": swaps, **told}


def compare_sampling(host: Host) -> dict[str, Any]:
    """How often the host waits for a step's tokens, and whether they are those of the CPU."""
    generator = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(4, 32_000, generator=generator)
    logits[2, 7] = torch.nan
    there, told = logits.to(CUDA), {}
    for name, sampling in SAMPLINGS.items():
        rows = [SampleRow(sampling, 5)] * 3 + [SampleRow(SAMPLINGS["greedy"], 5)]
        host.reads()
        found = sample_tokens(there, rows)
        waits = host.reads()
        tokens = [None if one is None else one.token for one in found]
        expected = [None if one is None else one.token for one in sample_tokens(logits, rows)]
        told[name] = {"waits": waits, "same": tokens == expected, "failed": tokens[2] is None}
    return told


def read_by_passes(folder: ModelFolder, host: Host) -> dict[str, Any]:
    """Bytes that a benchmark's decode pass reads, at the last stage and at the one before."""
    half, layers = folder.config.layers // 2, folder.config.layers
    told = {"rows": 64, "vocabulary": folder.config.vocab_size, "hidden": folder.config.hidden_size}
    for name, part in (("inner", (0, half)), ("last", (half, layers))):
        stage = Stage.load_layers(folder, part, "cuda:0", "f32")
        with StagePasses(stage, 1 << 30, 16) as passes:
            host.read_bytes()
            passes.run_decode(told["rows"], 128)
            told[name] = host.read_bytes()
    return told


def main() -> None:
    """Print the result of each case as a JSON object."""
    sys.modules["triton"] = None  # type: ignore[assignment]  # it would compile for a real card
    host = Host(Path(sys.argv[1]))
    folder, experts = (ModelFolder.open(Path(given)) for given in sys.argv[2:4])
    for dtype, capability in (("bf16", (8, 6)), ("f16", (7, 5))):
        with ExitStack() as stack:
            install_fake(stack, host, capability)
            assert has_pinned(CUDA)  # which is tried once
            # In 16 bits roundings send rows to other experts.
            for moved in (0, 5):
                told = compare(experts, host, "f32", "none", ("flash-attention",), moved)
                layers = 0 if moved else experts.config.layers
                print(json.dumps({"experts": told, "waits": layers}), flush=True)
            print(json.dumps({"sampling": compare_sampling(host)}), flush=True)
            print(json.dumps({"read": read_by_passes(folder, host)}), flush=True)
            checks = Path(sys.argv[1]).with_name(f"{dtype}.json")
            print(json.dumps({"proven": find_proven_kernels(checks, CUDA)}), flush=True)
            shapes = TrialShapes.from_config(folder.config, flash.PAGE_MULTIPLE, CUDA)
            for one in all_trials(CUDA, ("graphs",), shapes):
                print(json.dumps({"trial": one.run_trial()}), flush=True)
            for quantize in ("none", "int8", "nf4"):
                for avoid in ((), ("flash-attention",), ("flash-attention", "gather-attention")):
                    told = compare(folder, host, dtype, quantize, avoid)
                    case = [dtype, quantize, *avoid]
                    print(json.dumps({"case": case, **told}), flush=True)


if __name__ == "__main__":
    main()
