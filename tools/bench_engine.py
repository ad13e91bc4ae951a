"""One CPU stage with a whole model, compared with llama.cpp and transformers.

    python -m tools.make_bench_model FOLDER
    python -m tools.bench_engine FOLDER --llama-bench PATH/TO/llama-bench --json
    python -m tools.bench_engine FILE.gguf --llama-bench PATH/TO/llama-bench --no-transformers
    python -m tools.bench_engine FOLDER --llama-bench PATH/TO/llama-bench --long 4096 --rounds 2

Decode at batch 1 and prefill of one prompt, beside ``llama-bench`` with the f16 GGUF of the same
weights or the same FILE; then greedy generation at batch 8 beside ``transformers.generate`` in the
same dtype. Both sides use the same number of threads and take turns; figures are medians, ratios
medians of the rounds' ratios. Without ``--llama-bench`` only the share of the read bandwidth is
measured. ``--avoid gguf-blocks`` unpacks a FILE's weights to bf16. ``--avx2`` emulates a CPU
without AVX-512, where ``auto`` is float32; llama-bench must be built for AVX2 then. ``--cpu-time``
(Linux) counts CPU seconds instead of wall time.

``--long`` measures only prompts of these lengths, in chunks of 512 with shuffled KV blocks, and
decoding behind them, beside ``llama-bench`` with flash attention (``-fa on``) and KV in f16.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_names import GGUF_SUFFIX
from molink.cpu_isa import AVX2_ONLY
from molink.facts.dtypes import DTypeChoice
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.diagnostics.stage_bench import peak_read_rate
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES
from molinkd.platform import huge_pages

BLOCK = 16
PROMPT, DECODE = 128, 64
BATCH, BATCH_PROMPT, BATCH_NEW = 8, 32, 48
#: Rows per chunk of a long prompt, and tokens after it.
CHUNK, LONG_DECODE = 512, 32


#: Marks the measuring process, which has a worker's environment.
_MEASURES = "MOLINK_BENCH_ENGINE"


def main() -> int:
    """Measure and print, in a process with a worker's environment."""
    if _MEASURES not in os.environ:
        environment = huge_pages({**os.environ, _MEASURES: "1"})
        if "--avx2" in sys.argv:
            environment |= AVX2_ONLY
        return subprocess.run([sys.executable, *sys.orig_argv[1:]], env=environment).returncode
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder, or a GGUF file")
    parser.add_argument("--llama-bench", type=Path, help="path of llama-bench")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--avoid", default="", help="kernels to disable")
    parser.add_argument("--avx2", action="store_true", help="emulate a CPU without AVX-512")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds")
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--long", type=int, nargs="*", default=[], help="prompt lengths")
    parser.add_argument("--dtype", choices=("auto", *TORCH_DTYPES), default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as made:
        result = _measure_all(options, Path(made))
    print(json.dumps(result, indent=2) if options.json else _format_table(result))
    return 0


def _measure_all(options: argparse.Namespace, made: Path) -> dict[str, Any]:
    """All figures; a GGUF file is laid out in ``made``."""
    model: Path = options.model
    is_file = model.suffix == GGUF_SUFFIX
    folder = ModelFolder.open(
        import_gguf(model, made, NullCounter(), threading.Event()) if is_file else model
    )
    avoid = tuple(filter(None, options.avoid.split(",")))
    dtype: DTypeChoice = options.dtype
    stage = Stage.load_layers(
        folder, (0, folder.config.layers), dtype=dtype, disabled_kernels=avoid
    )
    longest = max(options.long, default=0) + LONG_DECODE + 1
    stage.allocate_kv_pool(max(BATCH * 128, -(-longest // BLOCK)), BLOCK)
    measure_decode(stage, 1, 0, 8)  # warm
    result: dict[str, Any] = {"model": model.name, "threads": options.threads}
    result |= {"dtype": stage.dtype, "weight_bytes": stage.weight_bytes}
    if options.long:
        return result | {
            "long": [_measure_long_prompt(stage, options, length) for length in options.long]
        }
    result |= _against_llama(stage, options)
    if options.transformers:
        result |= _against_transformers(stage, options)
    return result


def _against_llama(stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """Batch-1 decode and prefill, tokens/s."""
    ours: dict[str, list[float]] = {"decode": [], "prefill": []}
    theirs: dict[str, list[float]] = {"decode": [], "prefill": []}
    clock = time.process_time if options.cpu_time else time.perf_counter
    measure = _llama_cpu if options.cpu_time else _llama_once
    bandwidth = []
    for _ in range(options.rounds):
        begin = clock()
        measure_decode(stage, 1, 0, DECODE)
        decoded = clock()
        measure_prefill(stage, PROMPT)
        ours["prefill"].append(PROMPT / (clock() - decoded))
        ours["decode"].append(DECODE / (decoded - begin))
        bandwidth.append(peak_read_rate(stage.device))
        if options.llama_bench:
            rates = measure(options.llama_bench, _find_rival(options.model), options.threads)
            for kind, rate in rates.items():
                theirs[kind].append(rate)
    streamed = stage.step_bytes
    share = [
        rate * streamed / maximum for rate, maximum in zip(ours["decode"], bandwidth, strict=True)
    ]
    return {
        "decode": _compare_rounds(ours["decode"], theirs["decode"]),
        "prefill": _compare_rounds(ours["prefill"], theirs["prefill"]),
        "read_bandwidth_gb_s": statistics.median(bandwidth) / 1e9,
        "decode_share_of_bandwidth": statistics.median(share),
    }


def _measure_long_prompt(stage: Stage, options: argparse.Namespace, length: int) -> dict[str, Any]:
    """A prompt of ``length`` tokens, and decoding after it: tokens/s."""
    ours: dict[str, list[float]] = {"prefill": [], "decode": []}
    theirs: dict[str, list[float]] = {"prefill": [], "decode": []}
    for _ in range(options.rounds):
        for kind, rate in _long_rates(stage, length).items():
            ours[kind].append(rate)
        if options.llama_bench:
            prefill = ["-fa", "on", "-p", str(length), "-n", "0"]
            decode = ["-fa", "on", "-p", "0", "-n", str(LONG_DECODE), "-d", str(length)]
            for given in (prefill, decode):
                rates = _run_llama_bench(
                    options.llama_bench, _find_rival(options.model), options.threads, given
                )
                for kind, rate in rates.items():
                    theirs[kind].append(rate)
        # A round takes minutes.
        print(f"{length} tokens: {ours}, llama.cpp {theirs}", file=sys.stderr, flush=True)
    return {"tokens": length} | {kind: _compare_rounds(ours[kind], theirs[kind]) for kind in ours}


def _long_rates(stage: Stage, length: int) -> dict[str, float]:
    blocks = -(-(length + LONG_DECODE + 1) // BLOCK)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.arange(length) % stage.config.vocab_size
    begin = time.perf_counter()
    for first in range(0, length, CHUNK):
        count = min(CHUNK, length - first)
        rows = (SequenceRows(first, count, table),)
        last = StageInput(ids[first : first + count], None, rows, (count - 1,))
        tokens = stage.forward(last).argmax(-1)
    between = time.perf_counter()
    for start in range(length, length + LONG_DECODE):
        rows = (SequenceRows(start, 1, table),)
        tokens = stage.forward(StageInput(tokens, None, rows, (0,))).argmax(-1)
    end = time.perf_counter()
    return {"prefill": length / (between - begin), "decode": LONG_DECODE / (end - between)}


def _find_rival(model: Path) -> Path:
    """The GGUF file for llama.cpp."""
    return model if model.is_file() else next(model.glob("*.gguf"), model)


def _against_transformers(stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy generation of a batch, output tokens/s, prefill included."""
    generate = _make_transformers(options.model, stage)
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(BATCH * BATCH_NEW / measure_decode(stage, BATCH, BATCH_PROMPT, BATCH_NEW))
        theirs.append(BATCH * BATCH_NEW / generate())
    return {"batch_8": _compare_rounds(ours, theirs)}


def _compare_rounds(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Medians of both sides, tokens/s, and the median of the rounds' ratios."""
    if not theirs:
        return {"molink": statistics.median(ours)}
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "molink": statistics.median(ours),
        "baseline": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def measure_decode(stage: Stage, batch: int, prompt: int, count: int) -> float:
    """Seconds for ``count`` greedy tokens per sequence after prompts of ``prompt`` tokens."""
    width = -(-(prompt + count + 1) // BLOCK)
    tables = [range(row * width, (row + 1) * width) for row in range(batch)]
    begin = time.perf_counter()
    tokens = torch.zeros(batch, dtype=torch.int64)
    at = 0
    if prompt:
        chunks = tuple(SequenceRows(0, prompt, table) for table in tables)
        ids = torch.arange(batch * prompt) % stage.config.vocab_size
        last = tuple(prompt * (row + 1) - 1 for row in range(batch))
        tokens = stage.forward(StageInput(ids, None, chunks, last)).argmax(-1)
        at, count = prompt, count - 1
    for start in range(at, at + count):
        rows = tuple(SequenceRows(start, 1, table) for table in tables)
        tokens = stage.forward(StageInput(tokens, None, rows, tuple(range(batch)))).argmax(-1)
    return time.perf_counter() - begin


def measure_prefill(stage: Stage, count: int) -> float:
    """Seconds for a prompt of ``count`` tokens."""
    rows = (SequenceRows(0, count, range(-(-count // BLOCK))),)
    ids = torch.arange(count) % stage.config.vocab_size
    begin = time.perf_counter()
    stage.forward(StageInput(ids, None, rows, (count - 1,)))
    return time.perf_counter() - begin


def _run_llama_bench(
    binary: Path, model: Path, threads: int, lengths: Sequence[str]
) -> dict[str, float]:
    """Tokens/s of llama-bench for the given lengths."""
    command = [str(binary), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]
    command += lengths
    done = subprocess.run(command, capture_output=True, check=True)
    runs = json.loads(done.stdout)  # UTF-8, not the console's encoding
    return {"decode" if run["n_gen"] else "prefill": float(run["avg_ts"]) for run in runs}


def _llama_once(binary: Path, model: Path, threads: int) -> dict[str, float]:
    return _run_llama_bench(binary, model, threads, ["-p", str(PROMPT), "-n", str(DECODE)])


def _llama_cpu(binary: Path, model: Path, threads: int) -> dict[str, float]:
    """Tokens per CPU second: three repetitions minus one, without loading."""
    found = {}
    for kind, sizes, count in (
        ("prefill", ["-p", str(PROMPT), "-n", "0"], PROMPT),
        ("decode", ["-p", "0", "-n", str(DECODE)], DECODE),
    ):
        spent = []
        for repeated in ("1", "3"):
            command = [str(binary), "-m", str(model), "-t", str(threads), "-r", repeated, *sizes]
            before = os.times()
            subprocess.run(command, capture_output=True, check=True)
            after = os.times()
            user, system = (
                getattr(after, part) - getattr(before, part)
                for part in ("children_user", "children_system")
            )
            spent.append(user + system)
        found[kind] = 2 * count / (spent[1] - spent[0])
    return found


def _make_transformers(folder: Path, stage: Stage) -> Callable[[], float]:
    """Return a function that generates once and returns seconds."""
    from transformers import AutoModelForCausalLM

    kind = TORCH_DTYPES[stage.dtype]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    ids = torch.arange(BATCH * BATCH_PROMPT).view(BATCH, BATCH_PROMPT) % stage.config.vocab_size
    settings: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": BATCH_NEW,
        "min_new_tokens": BATCH_NEW,
    }

    def generate() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        return time.perf_counter() - begin

    generate()
    return generate


def _format_lines(result: dict[str, Any], of_what: str) -> list[str]:
    lines = []
    for name in ("decode", "prefill", "batch_8"):
        if found := result.get(name):
            versus = (
                f" / {found['baseline']:.1f} = {found['ratio']:.2f} x {found['ratios']}"
                if "baseline" in found
                else ""
            )
            lines.append(f"{name + of_what:8} {found['molink']:8.1f} tokens/s{versus}")
    return lines


def _format_table(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}, {result['dtype']}, {result['threads']} thread(s)"]
    lines += _format_lines(result, "")
    for long in result.get("long", ()):
        lines += _format_lines(long, f", {long['tokens']} tokens")
    if "read_bandwidth_gb_s" not in result:
        return "\n".join(lines)
    lines.append(
        f"decode reads weights at {result['decode_share_of_bandwidth']:.0%} of "
        f"{result['read_bandwidth_gb_s']:.1f} GB/s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
