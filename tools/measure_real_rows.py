"""What packing saves on rows between the stages of a real model that reads and writes real text.

    python -m tools.measure_real_rows FILE.gguf docs/*.md README.md
    python -m tools.measure_real_rows FILE.gguf docs/*.md --cuts 1 15 29 --json

The model (a GGUF file, or a folder) reads the beginning of each TEXT in chunks, then answers on
from there, token by token. At each cut (so many layers before it) its bf16 rows are packed as the
link packs them: chunks of a prompt, the decode rows of one stream, and those of all TEXTs at once.
Ratios are plain bytes by packed ones. *Ideal* is what the entropy of the exponents alone would
give: 16 bits by 8 and that entropy. See ``tools.measure_compression`` for rates, and for the
bundled model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import NullCounter
from molink.link.packing.compression import RowCodec
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.base import Coding, Payload
from tools.measure_compression import raw

_BLOCK = 16
_DTYPE = "bf16"


class CutModel:
    """A model as stages with ``cuts`` between them, that keeps the rows of one sequence's steps."""

    def __init__(self, folder: ModelFolder, cuts: Sequence[int], room: int) -> None:
        self.cuts = cuts
        ends = [0, *cuts, folder.config.layers]
        self._stages = [Stage.load_layers(folder, part, "cpu", _DTYPE) for part in pairwise(ends)]
        self._blocks = range(-(-room // _BLOCK))
        for stage in self._stages:
            stage.allocate_kv_pool(len(self._blocks), _BLOCK)

    def step(self, tokens: Sequence[int], start: int) -> tuple[int, list[Tensor]]:
        """The likeliest token after ``tokens`` (from ``start`` on), and the rows at each cut."""
        sequences = (SequenceRows(start, len(tokens), self._blocks),)
        wanted = (len(tokens) - 1,)
        rows = self._stages[0].forward(StageInput(torch.tensor(tokens), None, sequences, wanted))
        found = []
        for stage in self._stages[1:]:
            found.append(rows.clone())
            rows = stage.forward(StageInput(None, rows, sequences, wanted))
        return int(rows[0].argmax()), found


def collect(
    model: CutModel, texts: Sequence[list[int]], prompt: int, chunk: int, answer: int
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """By cut: chunks of all prompts, and of each text the decode rows ``[answer, hidden]``."""
    chunks: list[list[Tensor]] = [[] for _ in model.cuts]
    decodes: list[list[Tensor]] = [[] for _ in model.cuts]
    for text in texts:
        following = 0
        for start in range(0, prompt, chunk):
            following, rows = model.step(text[start : min(start + chunk, prompt)], start)
            for kept, each in zip(chunks, rows, strict=True):
                kept.append(each)
        steps = []
        for at in range(prompt, prompt + answer):
            following, rows = model.step([following], at)
            steps.append(rows)
        for kept, found in zip(decodes, zip(*steps, strict=True), strict=True):
            kept.append(torch.cat(found))
    return chunks, decodes


def ratio(codec: RowCodec, messages: Sequence[Tensor]) -> float:
    """Plain bytes of all messages by the packed ones."""
    plain = packed = 0
    for rows in messages:
        data = raw(rows, _DTYPE)
        header = Payload(_DTYPE, (rows.shape[0], rows.shape[1]))
        head, _ = codec.pack_rows(header, data, Coding.LOSSLESS)
        plain, packed = plain + len(data), packed + head.wire_bytes
    return plain / packed


def ideal(messages: Sequence[Tensor]) -> float:
    """What a code of the exponents' entropy over all messages would give."""
    words = np.frombuffer(raw(torch.cat(list(messages)), _DTYPE), np.uint16)
    counts = np.bincount((words >> 7) & 0xFF)
    shares = counts[counts > 0] / counts.sum()
    return float(16 / (8 - (shares * np.log2(shares)).sum()))


def figures(
    cuts: Sequence[int], chunks: Sequence[list[Tensor]], decodes: Sequence[list[Tensor]]
) -> list[dict[str, Any]]:
    """One row for each cut."""
    codec = RowCodec()
    found = []
    for cut, read, written in zip(cuts, chunks, decodes, strict=True):
        together = torch.stack(written, 1)  # [answer, texts, hidden]
        found.append(
            {
                "cut": cut,
                "prefill": round(ratio(codec, read), 3),
                "prefill ideal": round(ideal(read), 3),
                "decode, 1 row": round(ratio(codec, torch.cat(written).split(1)), 3),
                f"decode, {len(written)} rows": round(ratio(codec, together.unbind(0)), 3),
                "decode ideal": round(ideal(written), 3),
            }
        )
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--cuts", type=int, nargs="+", default=[1, 5, 10, 15, 20, 25, 29])
    parser.add_argument("--prompt", type=int, default=384, help="tokens of each text")
    parser.add_argument("--chunk", type=int, default=128, help="rows of a prefill message")
    parser.add_argument("--answer", type=int, default=48, help="tokens that are written")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as room:
        path = options.model
        if path.is_file():
            path = import_gguf(path, Path(room), NullCounter(), threading.Event())
        folder, tokenizer = ModelFolder.open(path), Tokenizer.open(path)
        ids = [tokenizer.encode(one.read_text(encoding="utf-8")) for one in options.texts]
        texts = [one[: options.prompt] for one in ids if len(one) >= options.prompt]
        model = CutModel(folder, options.cuts, options.prompt + options.answer)
        found = figures(
            options.cuts, *collect(model, texts, options.prompt, options.chunk, options.answer)
        )
    if options.json:
        about = {"model": options.model.name, "texts": len(texts), "row": folder.config.hidden_size}
        print(json.dumps({**about, "cuts": found}, indent=2))
        return
    print(" | ".join(found[0]))
    for row in found:
        print(" | ".join(str(value) for value in row.values()))


if __name__ == "__main__":
    main()
