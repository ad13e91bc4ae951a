"""How well and how fast activations are packed for a link, and what 8-bit rows cost in quality.

    python -m tools.measure_compression
    python -m tools.measure_compression --json
    python -m tools.make_bench_model random-1024 --no-gguf --layers 8
    python -m tools.measure_compression --other random-1024

Packed are the rows that the bundled model sends from one half of its layers to the other while it
reads held-out conversations (and those that another model sends for random tokens), in messages of
the sizes that links carry. Rates are bytes of plain rows per second of one core's time, the best of
some repetitions. ``tried`` compares ways to compress the bytes of the exponents. ``quality`` runs
the bundled model in 2 and 3 stages with 8-bit rows between them: perplexity per token (of all
tokens, and of those that the assistant wrote), how often the most probable next token is the same
as with exact rows, and the divergence of the distributions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.dtypes import DTYPE_SIZES, WEIGHT_DTYPES, DType
from molink.link.packing.compression import RowCodec, entropy_coder
from molink.link.packing.planes import BytePlanes
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import MAX_PAYLOAD
from tools.demo_model.tokenizer import answered, encode, load_tokenizer
from tools.demo_model.train import conversations
from tools.train_demo_model import FOLDER

_BLOCK = 16
#: One decode row of a 4096-wide bf16 model, eight of them, and a message of prefill rows.
_SIZES = (8 << 10, 64 << 10, 192 << 10)
_LEVELS = (-5, -3, -1, 1, 2, 3)
#: Seconds for which the same is timed over and over: Windows counts a thread's in ticks of 15.6 ms.
_LEAST_S = 0.1 if sys.platform == "win32" else 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Of messages of ``message`` bytes; rates in MB/s of plain rows."""

    model: str
    dtype: str
    coding: str
    message: int
    ratio: float
    pack: float
    unpack: float


@dataclass(frozen=True, slots=True)
class Tried:
    """A way to compress the top bytes of bf16 rows (192 KB messages), and MB/s of plain rows."""

    model: str
    way: str
    ratio: float
    pack: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Of 8-bit rows at each hop, against exact ones; ``divergence`` is KL in nats per token."""

    dtype: str
    stages: int
    perplexity_exact: float
    perplexity: float
    answer_perplexity_exact: float
    answer_perplexity: float
    agreement: float
    divergence: float


# --- activations -----------------------------------------------------------------------------


def split(layers: int, stages: int) -> list[tuple[int, int]]:
    """``stages`` ranges of about as many layers each."""
    ends = [round(layers * stage / stages) for stage in range(stages + 1)]
    return list(itertools.pairwise(ends))


def load_stages(folder: ModelFolder, dtype: Any, stages: int, longest: int) -> list[Stage]:
    """The model in ``stages`` stages with room for ``longest`` tokens."""
    made = []
    for layers in split(folder.config.layers, stages):
        made.append(Stage.load_layers(folder, layers, "cpu", dtype))
        made[-1].allocate_kv_pool(-(-longest // _BLOCK), _BLOCK)
    return made


def forward(stages: Sequence[Stage], text: Any, hop: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits of all positions, or what comes out of the last stage that is given."""
    rows = len(text)
    sequence = SequenceRows(0, rows, range(-(-rows // _BLOCK)))
    wanted = tuple(range(rows)) if stages[-1].is_last else ()
    out = stages[0].forward(StageInput(torch.from_numpy(text), None, (sequence,), wanted))
    for stage in stages[1:]:
        out = stage.forward(StageInput(None, hop(out), (sequence,), wanted))
    return out


def activations(folder: ModelFolder, texts: Sequence[Any], dtype: Any) -> bytes:
    """Rows that the first half of the model sends, in ``dtype``."""
    stage = load_stages(folder, dtype, 2, max(map(len, texts)))[0]
    rows = torch.cat([forward([stage], text, lambda rows: rows) for text in texts])
    return raw(rows, dtype)


def raw(rows: Tensor, dtype: Any) -> bytes:
    """The bytes of rows as they travel."""
    return bytes(rows.to(TORCH_DTYPES[dtype]).contiguous().view(torch.uint8).numpy().data)


# --- sizes and rates -------------------------------------------------------------------------


def best_seconds(work: Callable[[], object], repeat: int) -> float:
    """The least time of this thread that ``work`` took."""
    return min(_seconds(work) for _ in range(repeat))


def _seconds(work: Callable[[], object]) -> float:
    start, count, spent = time.thread_time(), 0, 0.0
    while spent <= _LEAST_S:
        work()
        count, spent = count + 1, time.thread_time() - start
    return spent / count


def messages(data: bytes, row: int, size: int) -> list[bytes]:
    """``data`` in messages of whole rows of at most ``size`` bytes (or one row), at most 24."""
    size = max(row, size // row * row)
    return [data[at : at + size] for at in range(0, len(data) - size + 1, size)][:24]


def speeds(model: str, data: bytes, dtype: DType, hidden: int, repeat: int) -> Iterator[Speed]:
    """Figures of all codings and sizes of messages."""
    for size in _SIZES:
        parts = messages(data, hidden * DTYPE_SIZES[dtype], size)
        for coding in (Coding.LOSSLESS, Coding.INT8):
            yield speed(model, parts, dtype, hidden, coding, repeat)


def speed(
    model: str, parts: Sequence[bytes], dtype: DType, hidden: int, coding: Coding, repeat: int
) -> Speed:
    """Figures of messages of the same size."""
    codec, plain = RowCodec(), sum(map(len, parts))
    header = Payload(dtype, (len(parts[0]) // hidden // DTYPE_SIZES[dtype], hidden))
    packed = [codec.pack_rows(header, part, coding) for part in parts]
    if coding is Coding.LOSSLESS:
        same = zip(packed, parts, strict=True)
        assert all(bytes(codec.unpack_rows(*each)[1]) == part for each, part in same)
    pack = best_seconds(lambda: [codec.pack_rows(header, part, coding) for part in parts], repeat)
    unpack = best_seconds(lambda: [codec.unpack_rows(*each) for each in packed], repeat)
    return Speed(
        model,
        dtype,
        coding.name.lower(),
        len(parts[0]),
        round(plain / sum(head.wire_bytes for head, _ in packed), 3),
        round(plain / pack / 1e6),
        round(plain / unpack / 1e6),
    )


def tried(model: str, data: bytes, hidden: int, repeat: int) -> Iterator[Tried]:
    """Ways to compress the exponents of bf16 rows; the other bytes stay as they are."""
    parts = messages(data, 2 * hidden, _SIZES[-1])
    plain, planes = sum(map(len, parts)), BytePlanes(MAX_PAYLOAD)
    tops = [bytes(planes.split_planes(memoryview(part), 2)[0]) for part in parts]
    others = [bytes(planes.split_planes(memoryview(part), 2)[1]) for part in parts]

    def row(way: str, compress: Callable[[bytes], bytes], given: list[bytes], rest: int) -> Tried:
        size = sum(len(compress(each)) for each in given) + rest
        seconds = best_seconds(lambda: [compress(each) for each in given], repeat)
        return Tried(model, way, round(plain / size, 3), round(plain / seconds / 1e6))

    first = zstandard.ZstdCompressor(level=1).compress
    for level in _LEVELS:
        compress = zstandard.ZstdCompressor(level=level).compress
        yield row(f"exponents, zstd {level}", compress, tops, plain // 2)
    ours = entropy_coder().compress
    yield row("exponents, entropy code only", ours, tops, plain // 2)
    yield row("both planes, entropy code only", ours, [*tops, *others], 0)
    yield row("all bytes as they are, zstd 1", first, parts, 0)
    high = [part[1::2] for part in parts]
    yield row("upper bytes, not rotated, entropy code only", ours, high, plain // 2)
    square = [np.frombuffer(top, np.uint8).reshape(-1, hidden) for top in tops]
    columns = [bytes(np.ascontiguousarray(each.T).data) for each in square]
    yield row("exponents by column, zstd 1", first, columns, plain // 2)
    change = [bytes((each ^ np.roll(each, 1, 0)).data) for each in square]
    yield row("exponents, XOR with the row before, zstd 1", first, change, plain // 2)


# --- quality ---------------------------------------------------------------------------------


def int8_hop(dtype: Any, hidden: int) -> Callable[[Tensor], Tensor]:
    """What becomes of rows that travel in 8 bits."""
    codec = RowCodec()

    def message(rows: Tensor) -> Tensor:
        header = Payload(dtype, (len(rows), hidden))
        _, back = codec.unpack_rows(*codec.pack_rows(header, raw(rows, dtype), Coding.INT8))
        flat = torch.frombuffer(bytearray(back), dtype=TORCH_DTYPES[dtype])
        return flat.view(len(rows), hidden)

    def hop(rows: Tensor) -> Tensor:
        return torch.cat([message(part) for part in rows.split(64)])

    return hop


def quality(folder: ModelFolder, texts: Sequence[Any], masks: Sequence[Any]) -> Iterator[Quality]:
    """Figures of 2 and 3 stages in the types that the bundled model runs in."""
    mask = torch.from_numpy(np.concatenate([mask[1:] for mask in masks]))
    wanted = torch.from_numpy(np.concatenate([text[1:] for text in texts]))[:, None]

    def perplexity(found: Tensor, of: Tensor) -> float:
        return round(math.exp(-float(found.gather(1, wanted)[:, 0][of].mean())), 4)

    for dtype in ("f32", "bf16"):
        for count in (2, 3):
            stages = load_stages(folder, dtype, count, max(map(len, texts)))
            exact, coarse = (
                torch.cat(
                    [
                        torch.log_softmax(forward(stages, text[:-1], hop).double(), -1)
                        for text in texts
                    ]
                )
                for hop in (lambda rows: rows, int8_hop(dtype, folder.config.hidden_size))
            )
            everything = torch.ones_like(mask)
            yield Quality(
                dtype,
                count,
                perplexity(exact, everything),
                perplexity(coarse, everything),
                perplexity(exact, mask),
                perplexity(coarse, mask),
                round(float((coarse.argmax(1) == exact.argmax(1)).double().mean()), 4),
                round(float((exact.exp() * (exact - coarse)).sum(1).mean()), 6),
            )


# --- the whole -------------------------------------------------------------------------------


def measure(
    sources: dict[str, tuple[ModelFolder, Sequence[Any]]], masks: Sequence[Any], repeat: int
) -> dict[str, Any]:
    """All figures; the first source is the bundled model."""
    found: dict[str, Any] = {"zstandard": zstandard.__version__, "numpy": np.__version__}
    found["rows"] = {name: sum(map(len, texts)) for name, (_, texts) in sources.items()}
    found["speed"], found["tried"] = [], []
    for name, (folder, texts) in sources.items():
        hidden = folder.config.hidden_size
        for dtype in WEIGHT_DTYPES:
            data = activations(folder, texts, dtype)
            found["speed"] += map(asdict, speeds(name, data, dtype, hidden, repeat))
            if dtype == "bf16":
                found["tried"] += map(asdict, tried(name, data, hidden, repeat))
    bundled, texts = next(iter(sources.values()))
    found["quality"] = list(map(asdict, quality(bundled, texts, masks)))
    return found


def show(found: dict[str, Any]) -> None:
    """Print tables."""
    for table in ("speed", "tried", "quality"):
        names = list(found[table][0])
        rows = [[str(row[name]) for name in names] for row in found[table]]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        print(f"\n{table}")
        for row in (names, *rows):
            cells = zip(row, widths, strict=True)
            print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="folder of another model, for random tokens")
    parser.add_argument("--conversations", type=int, default=120, help="held-out ones")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(FOLDER)
    texts = encode(tokenizer, conversations("held_out", arguments.conversations, arguments.seed))
    masks = [answered(tokenizer, text) for text in texts]
    sources: dict[str, Any] = {"bundled": (ModelFolder.open(FOLDER), texts)}
    if arguments.other is not None:
        folder = ModelFolder.open(arguments.other)
        random = np.random.default_rng(arguments.seed)
        tokens = random.integers(0, folder.config.vocab_size, (8, 256), dtype=np.int64)
        sources[arguments.other.name] = (folder, list(tokens))
    found = measure(sources, masks, arguments.repeat)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
