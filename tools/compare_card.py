"""One stage on a card compared with llama.cpp on the same files, in one run.

    pip download --no-deps --no-binary :all: llama-cpp-python       # has llama.cpp's source
    python -m tools.compare_card WORK --llama-source llama_cpp_python-VERSION.tar.gz
    python -m tools.compare_card WORK --llama BIN --device cpu --layers 1 --rounds 1   # a trial

Builds llama.cpp in WORK (or takes its programs from BIN), makes a model with eight layers of Llama
3 8B's shape and one with four of Qwen3-30B-A3B's, quantizes them, and measures steps in
milliseconds: the products alone as one CUDA graph (the floor), ``llama-batched-bench`` and
``llama-bench`` with flash attention, and molink's steps with sampling, as a worker runs them. Both
sides take turns; figures are medians of the rounds, ratios llama.cpp's time by molink's (above 1:
molink is faster). Prints a table and writes ``compare_card.json``. With the build on 16 cores it is
meant to take under nine minutes; 16 GB of GPU memory.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.facts.model import BLOCK_SIZE
from molink.stage.diagnostics.stage_passes import StagePasses
from molink.stage.stage import Stage
from tools.make_bench_model import SHAPES, VOCABULARY, Shape

#: Decode rows of short and long contexts, and prompt lengths.
_ROWS, _DEEP_ROWS, _PROMPTS = (1, 4, 8, 16, 64), (1, 8), (512, 1024)
#: llama-batched-bench decodes the first number of tokens after prompts of the other two lengths.
_NEW, _SHORT, _DEEP = 64, 128, 8000
_WARM_UP, _REPEATS = 3, 15
_PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize")
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_CUDA_NCCL=OFF",
    "-DGGML_CUDA_NO_VMM=ON",
    *(f"-DLLAMA_{part}=OFF" for part in ("CURL", "OPENSSL", "UI")),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER", "UI")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step: decode rows behind ``context`` tokens, or a prompt's rows."""

    rows: int
    context: int = -1

    @property
    def name(self) -> str:
        """Name in the table."""
        if self.context < 0:
            return f"prompt of {self.rows}"
        return f"{self.rows} at {self.context}"


@dataclass(slots=True)
class Times:
    """Milliseconds of each round, by case and side."""

    molink: dict[Case, list[float]] = field(default_factory=dict)
    llama: dict[Case, list[float]] = field(default_factory=dict)

    def describe(self, floor: dict[Case, float]) -> list[dict[str, Any]]:
        """One entry per case that both sides have."""
        found = []
        for case in sorted(self.molink.keys() & self.llama.keys(), key=_order):
            ours, theirs = self.molink[case], self.llama[case]
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            found.append(
                {
                    "step": case.name,
                    "molink_ms": statistics.median(ours),
                    "llama_ms": statistics.median(theirs),
                    "ratio": statistics.median(ratios),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                    "floor_ms": floor.get(case),
                }
            )
        return found


def _order(case: Case) -> tuple[bool, int, int]:
    return case.context < 0, case.context, case.rows


class LlamaPrograms:
    """llama.cpp's programs."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._cuda = folder, device.type == "cuda"

    @classmethod
    def build(cls, source: Path, work: Path, device: torch.device) -> "LlamaPrograms":
        """Build them in ``work`` from the source package, unless that is done."""
        build = work / "llama-build"
        if not all((build / "bin" / program).is_file() for program in _PROGRAMS):
            with tarfile.open(source) as package:
                package.extractall(work / "llama-source", filter="data")
            (root,) = (work / "llama-source").glob("*/vendor/llama.cpp")
            options = [*_OPTIONS, f"-DGGML_CUDA={'ON' if device.type == 'cuda' else 'OFF'}"]
            if device.type == "cuda":
                major, minor = torch.cuda.get_device_capability(device)
                options.append(f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}")
            _run("cmake", "-S", str(root), "-B", str(build), *options)
            jobs = str(os.cpu_count() or 1)
            _run("cmake", "--build", str(build), "-j", jobs, "-t", *_PROGRAMS)
        return cls(build / "bin", device)

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        """Write ``source`` (f16) as ``target`` in another format."""
        _run(str(self._folder / "llama-quantize"), str(source), str(target), kind)

    def measure_decode(self, model: Path, rows: tuple[int, ...], context: int) -> dict[Case, float]:
        """Milliseconds of a step behind ``context`` tokens, by number of rows."""
        positions = max(rows) * (context + _NEW)
        options = ["-c", str(positions), "-npp", str(context), "-ntg", str(_NEW)]
        options += ["-npl", ",".join(map(str, rows)), "--output-format", "jsonl", *self._layers()]
        output = self._run_program("llama-batched-bench", model, ["-fa", "on", *options])
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return {Case(line["pl"], context): 1e3 * line["pl"] / line["speed_tg"] for line in lines}

    def measure_prompts(self, model: Path) -> dict[Case, float]:
        """Milliseconds of a prompt, by its length."""
        options = ["-p", ",".join(map(str, _PROMPTS)), "-n", "0", "-r", "3", "-o", "json"]
        output = self._run_program("llama-bench", model, ["-fa", "1", *options, *self._layers()])
        return {
            Case(run["n_prompt"]): 1e3 * run["n_prompt"] / run["avg_ts"]
            for run in json.loads(output)
        }

    def _layers(self) -> list[str]:
        return ["-ngl", "99"] if self._cuda else ["-ngl", "0"]

    def _run_program(self, program: str, model: Path, options: list[str]) -> str:
        return _run(str(self._folder / program), "-m", str(model), *options)


def _run(*command: str) -> str:
    """Standard output of a command; its errors are shown if it fails."""
    print(" ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    return done.stdout


def make_files(work: Path, layers: int, llama: LlamaPrograms) -> Iterator[tuple[str, Shape, Path]]:
    """Name, shape and GGUF file of each model, made where missing."""
    for shape, depth, kinds in (
        ("wide", layers, ("F16", "Q8_0", "Q4_K_M")),
        ("experts", max(1, layers // 2), ("Q4_K_M",)),
    ):
        folder = work / f"{shape}-{depth}"
        plain = folder / "model-f16.gguf"
        if not plain.is_file():
            making = [sys.executable, "-m", "tools.make_bench_model", str(folder)]
            _run(*making, "--shape", shape, "--layers", str(depth))
        for kind in kinds:
            path = plain if kind == "F16" else folder / f"model-{kind}.gguf"
            if not path.is_file():
                llama.quantize(plain, path, kind)
            yield f"{shape} {kind}", SHAPES[shape], path


class MolinkSteps:
    """A stage with all layers of a GGUF file."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._device = device
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            stop = threading.Event()
            folder = ModelFolder.open(import_gguf(path, Path(made), NullCounter(), stop))
            layers = (0, folder.config.layers)
            self.stage = Stage.load_layers(folder, layers, str(device))

    def measure_steps(self) -> dict[Case, float]:
        """Milliseconds of each case."""
        found: dict[Case, float] = {}
        middle = _NEW // 2  # llama-batched-bench's mean context
        decodes = [(rows, _SHORT) for rows in _ROWS] + [(rows, _DEEP) for rows in _DEEP_ROWS]
        positions = max(rows * (context + _NEW + BLOCK_SIZE) for rows, context in decodes)
        with StagePasses(self.stage, 0, BLOCK_SIZE, positions) as passes:
            for rows, context in decodes:
                self.stage.capture_graph(rows, context + _NEW)
                step = partial(passes.run_decode, rows, context + middle)
                found[Case(rows, context)] = _time_run(step)
            for rows in _PROMPTS:
                found[Case(rows)] = _time_run(partial(passes.run_prefill, rows, 0))
        return found


def _time_run(run: Callable[[], None]) -> float:
    """Median milliseconds of a pass, which waits for the device."""
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[_WARM_UP:])


def measure_floor(shape: Shape, layers: int, device: torch.device) -> dict[Case, float]:
    """Milliseconds of a Llama's matrix products in bf16, as one CUDA graph."""
    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = [
        (heads + 2 * keys, shape.hidden),
        (shape.hidden, heads),
        (2 * shape.inner, shape.hidden),
        (shape.hidden, shape.inner),
    ] * layers + [(VOCABULARY, shape.hidden)]
    weights = [torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes]
    found = {}
    for case in (*(Case(rows, _SHORT) for rows in _ROWS), *(Case(rows) for rows in _PROMPTS)):
        rows = {
            width: torch.randn(case.rows, width, device=device, dtype=torch.bfloat16)
            for _, width in sizes
        }

        sampled = slice(None) if case.context >= 0 else slice(-1, None)
        found[case] = _time_graph(partial(_multiply_all, weights, rows, sampled), device)
    return found


def _multiply_all(
    weights: list[torch.Tensor], rows: dict[int, torch.Tensor], sampled: slice
) -> None:
    """The products of a step; the head's for the ``sampled`` rows only."""
    for weight in weights[:-1]:
        linear(rows[weight.shape[1]], weight)
    head = weights[-1]
    linear(rows[head.shape[1]][sampled], head)


def _time_graph(work: Callable[[], None], device: torch.device) -> float:
    for _ in range(_WARM_UP):
        work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return _time_run(replay)


@torch.inference_mode()
def compare_file(path: Path, llama: LlamaPrograms, device: torch.device, rounds: int) -> Any:
    """Times of both sides, and what the weights take."""
    times, steps = Times(), MolinkSteps(path, device)
    for _ in range(rounds):
        theirs = {
            **llama.measure_decode(path, _ROWS, _SHORT),
            **llama.measure_decode(path, _DEEP_ROWS, _DEEP),
            **llama.measure_prompts(path),
        }
        for side, measured in ((times.llama, theirs), (times.molink, steps.measure_steps())):
            for case, taken in measured.items():
                side.setdefault(case, []).append(taken)
    weights = steps.stage.weight_bytes
    del steps
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return times, weights


def main() -> None:
    """Measure all files; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path, help="a folder for what is made; used again")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--llama-source", type=Path, help="llama-cpp-python's source package")
    source.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    work, device = options.work, torch.device(options.device)
    work.mkdir(parents=True, exist_ok=True)
    if options.llama is not None:
        llama = LlamaPrograms(options.llama, device)
    else:
        llama = LlamaPrograms.build(options.llama_source, work, device)
    on_card = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_card else "CPU",
        "torch": torch.__version__,
        "files": {},
    }
    for name, shape, path in make_files(work, options.layers, llama):
        dense = on_card and not shape.experts
        floor = measure_floor(shape, options.layers, device) if dense else {}
        times, weights = compare_file(path, llama, device, options.rounds)
        result["files"][name] = {
            "file_bytes": path.stat().st_size,
            "weight_bytes": weights,
            "steps": times.describe(floor),
        }
        print(format_file(name, result["files"][name]), flush=True)
        (work / "compare_card.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


def format_file(name: str, found: dict[str, Any]) -> str:
    """One file's lines."""
    share = found["weight_bytes"] / found["file_bytes"]
    lines = [f"{name}: weights take {share:.3f} of the file"]
    for step in found["steps"]:
        floor = "" if step["floor_ms"] is None else f", products alone {step['floor_ms']:.2f}"
        lines.append(
            f"  {step['step']:>14}: molink {step['molink_ms']:.2f} ms, llama.cpp "
            f"{step['llama_ms']:.2f}, {step['ratio']:.2f} x {step['ratios']}{floor}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
