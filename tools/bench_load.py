"""What loading a stage costs: seconds, memory beside its weights, bytes that are read. Linux.

    python -m tools.bench_load --json         # needs 4 GB of disk and 9 GB of memory for a moment

Eight of the 32 layers of a model with the shapes of Llama 2 7B, without its ends, written to a
temporary folder with random weights: in bf16, and in blocks of Q4_0 as the folder has them that a
GGUF file becomes. Each is loaded by a process of its own, once after its files were dropped from
the page cache (``cold``) and once more (``warm``); kernels are compiled before. ``peak`` is of
memory that belongs to the process alone (``RssAnon``): pages of mapped files are the system's to
take back. ``read`` is what came from the disk, by ``/proc/self/io``: faults of mapped pages and
what is read ahead count there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.tensor_layout import layer_tensors
from molink.facts.model import Quantize
from molink.gguf.ggml_types import PACKED_TYPES, packed_name, packed_shape
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES, choose_dtype
from molink.stage.weights.weight_reader import WeightReader
from tools.make_bench_model import Shape, model_config

SHAPE, LAYERS, STAGE = Shape(4096, 32, 32, 11008), 32, (8, 16)
#: What is loaded: the folder's weights, and how they are kept.
CASES: tuple[tuple[str, Quantize], ...] = (("bf16", "none"), ("bf16", "int8"), ("q4_0", "none"))
#: Numbers that are repeated: random ones of a stage would take longer than all else.
_RANDOM = 1 << 22
_Q4_0 = PACKED_TYPES["q4_0"]
_SAMPLED_S = 0.002


def main() -> None:
    """Print a row for each way of loading."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=STAGE[1] - STAGE[0])
    parser.add_argument("--only", choices=[" ".join(case) for case in CASES])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers = (STAGE[0], STAGE[0] + options.layers)
    if options.child is not None:
        torch.set_num_threads(options.threads)
        print(json.dumps(measure(Path(options.child[0]), layers, options.child[1])))
        return
    for weights in dict.fromkeys(weights for weights, _ in CASES):
        with tempfile.TemporaryDirectory(prefix="molink-load-") as temporary:
            folder = Path(temporary)
            write_folder(folder, weights, layers)
            for case in CASES:
                if case[0] != weights or options.only not in (None, " ".join(case)):
                    continue
                for state in ("cold", "warm"):
                    if state == "cold":
                        drop_cache(folder / "model.safetensors")
                    command = [sys.executable, "-m", "tools.bench_load", "--child", temporary]
                    command += [case[1], "--layers", str(options.layers)]
                    command += ["--threads", str(options.threads)]
                    told = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                    found = {"weights": weights, "quantize": case[1], "cache": state}
                    print_row(found | json.loads(told), options.json)


def print_row(found: dict[str, Any], as_json: bool) -> None:
    """A line of JSON, or one to read."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    print(
        f"{found['weights']:5} {found['quantize']:5} {found['cache']}: {found['seconds']:6.2f} s, "
        f"{found['stage_mb']:6.0f} MB stored, {found['weights_mb']:6.0f} MB of weights, "
        f"peak beside them {found['beside_mb']:5.0f} MB, read {found['read']:.2f} of the stage",
        flush=True,
    )


def write_folder(folder: Path, weights: str, layers: tuple[int, int]) -> None:
    """A folder that has nothing but those layers."""
    (folder / "config.json").write_text(json.dumps(model_config(LAYERS, SHAPE)), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    config = ModelConfig.load_folder(folder, "bf16")
    header: dict[str, Any] = {}
    offset, rng = 0, np.random.default_rng(0)
    numbers = torch.from_numpy(rng.standard_normal(_RANDOM, np.float32) / 64).bfloat16()
    blocks = rng.integers(0, 256, (_RANDOM // 32, 18), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(2**-9).tobytes(), np.uint8)
    sources = {
        "BF16": memoryview(numbers.view(torch.uint8).numpy()),
        "U8": memoryview(blocks.reshape(-1)),
    }
    for layer in range(*layers):
        for name, shape in layer_tensors(config, layer).items():
            stored, dtype, nbytes = name, "BF16", 2 * int(np.prod(shape))
            if weights == "q4_0" and len(shape) == 2:
                stored, dtype = packed_name(name, _Q4_0), "U8"
                shape = packed_shape(_Q4_0, shape) or shape
                nbytes = shape[0] * shape[1]
            header[stored] = {
                "dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]
            }  # fmt: skip
            offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            for part in _repeated(sources[entry["dtype"]], end - begin):
                file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _repeated(source: memoryview, nbytes: int) -> Iterator[memoryview]:
    """So many bytes."""
    while nbytes > 0:
        part = source[:nbytes]
        nbytes -= len(part)
        yield part


def drop_cache(path: Path) -> None:
    """Have the system forget a file's pages."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, layers: tuple[int, int], quantize: Quantize) -> dict[str, float]:
    """Load a stage, in a process that does nothing else."""
    folder = ModelFolder.open(path, layers)
    stored = sum(folder.tensors[name].nbytes for name in folder.stage_tensors(*layers))
    dtype = TORCH_DTYPES[choose_dtype("auto", folder.config.dtype, torch.device("cpu"))]
    with torch.inference_mode(), WeightReader(folder, dtype, torch.device("cpu"), quantize) as one:
        one._projections.find_block_product("q4_0")  # compiled once in a process
    with Memory() as memory:
        before, begin = _read_bytes(), time.perf_counter()
        stage = Stage.load_layers(folder, layers, "cpu", quantize=quantize)
        seconds = time.perf_counter() - begin
    return {
        "seconds": round(seconds, 2),
        "stage_mb": round(stored / 1e6),
        "weights_mb": round(stage.weight_bytes / 1e6),
        "beside_mb": round((memory.peak - memory.first - stage.weight_bytes) / 1e6),
        "read": round((_read_bytes() - before) / stored, 3),
    }


class Memory:
    """Watches how much of the process's own memory is in use."""

    def __init__(self) -> None:
        self.first = self.peak = _own_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLED_S):
            self.peak = max(self.peak, _own_bytes())


def _own_bytes() -> int:
    return _number("/proc/self/status", "RssAnon:") * 1024


def _read_bytes() -> int:
    return _number("/proc/self/io", "read_bytes:")


def _number(path: str, name: str) -> int:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(f"{path} has no {name}")


if __name__ == "__main__":
    main()
