"""Weights that stay packed on a CPU beside the same ones made bf16, taking turns in one process.

    python -m tools.make_bench_model FOLDER --low-bit awq
    python -m tools.bench_packed FOLDER FILE.gguf --prompts 128 512
    python -m tools.bench_packed FOLDER --avx2

Tokens/s of prompts, and of decode steps of one and of 16 rows: medians of the rounds, the median of
their ratios, and from which to which these are. ``--avx2`` as in :mod:`tools.bench_engine`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

import torch

from molink.checkpoint.gguf_import import GGUF_SUFFIX, import_gguf
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import NullCounter
from molink.stage.kernels import compiler
from molink.stage.stage import Stage
from molinkd.platform import huge_pages
from tools.bench_engine import AVX2_ONLY, BLOCK, decode, prefill, without_avx512

_MEASURES = "MOLINK_BENCH_PACKED"
#: Rows of a decode step, and steps; of each side there is one round more, to warm up.
_STEPS = ((1, 24), (16, 8))


def main() -> int:
    """Measure and print, in a process with the environment of a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+", help="folders, or GGUF files")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--avx2", action="store_true", help="emulate a CPU without AVX-512")
    options = parser.parse_args()
    if _MEASURES not in os.environ:
        environment = huge_pages({**os.environ, _MEASURES: "1"})
        environment |= AVX2_ONLY if options.avx2 else {}
        return subprocess.run([sys.executable, *sys.orig_argv[1:]], env=environment).returncode
    torch.set_num_threads(1)
    if options.avx2:
        without = without_avx512()
        compiler.host_features = lambda: without
    for model in options.models:
        with tempfile.TemporaryDirectory() as made:
            _measure(model, Path(made), options)
    return 0


def _measure(model: Path, made: Path, options: argparse.Namespace) -> None:
    """Print the figures of one model; ``made`` is a folder for what a GGUF file becomes."""
    if model.suffix == GGUF_SUFFIX:
        folder = ModelFolder.open(import_gguf(model, made, NullCounter(), threading.Event()))
    else:
        folder = ModelFolder.open(model)
    sides = []
    for avoid in ((), ("gguf-blocks",)):
        dtype = "f32" if options.avx2 else "auto"
        sides.append(
            Stage.load_layers(
                folder, (0, folder.config.layers), dtype=dtype, disabled_kernels=avoid
            )
        )
        sides[-1].allocate_kv_pool(max(128, -(-max(options.prompts) // BLOCK)), BLOCK)
    rates: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(1 + options.rounds):
        for number, stage in enumerate(sides):
            for length in options.prompts:
                seconds = prefill(stage, length)
                name = f"prompt of {length}"
                rates.setdefault(name, ([], []))[number].append(length / seconds)
            for rows, count in _STEPS:
                seconds = decode(stage, rows, 0, count)
                name = f"decode of {rows}"
                rates.setdefault(name, ([], []))[number].append(rows * count / seconds)
    for name, (packed, full) in rates.items():
        ratios = [one / other for one, other in zip(packed[1:], full[1:], strict=True)]
        rate, other = median(packed[1:]), median(full[1:])
        print(
            f"{model.name:24} {name:14} packed {rate:6.1f}, bf16 {other:6.1f} tokens/s,"
            f" ratio {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
