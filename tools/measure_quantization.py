"""Quality of quantized weights and KV: on held-out conversations or TEXTs.

    python -m tools.measure_quantization
    python -m tools.measure_quantization --model FOLDER_OR_FILE.gguf TEXT... --tokens 220

Per mode: perplexity of all tokens and of the assistant's, agreement with fp32's most likely token,
KL divergence from fp32, and bytes of a layer. Each TEXT is cut to ``--tokens``. In ``auto`` rows
may be 8-bit beside weights of few bits.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import find_model
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import KVCacheDType, Quantize
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from molink.text.tokenizer import Tokenizer
from tools.demo_model.tokenizer import encode_conversations, load_tokenizer, mark_answers
from tools.demo_model.train import select_conversations
from tools.train_demo_model import FOLDER

_BLOCK = 16
#: The first mode is the reference.
MODES: dict[str, tuple[DTypeChoice, Quantize, KVCacheDType]] = {
    "fp32": ("f32", "none", "auto"),
    "auto": ("auto", "none", "auto"),
    "bf16": ("bf16", "none", "auto"),
    "int8": ("auto", "int8", "auto"),
    "int8 (fp32 rows)": ("f32", "int8", "auto"),
    "int8 (bf16 rows)": ("bf16", "int8", "auto"),
    "nf4": ("auto", "nf4", "auto"),
    "nf4 (fp32 rows)": ("f32", "nf4", "auto"),
    "nf4 (bf16 rows)": ("bf16", "nf4", "auto"),
    "int8 KV": ("auto", "none", "int8"),
    "int8 KV (fp32 rows)": ("f32", "none", "int8"),
    "int8 KV (bf16 rows)": ("bf16", "none", "int8"),
}


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of one mode; ``divergence`` is KL from fp32 in nats per token."""

    mode: str
    perplexity: float
    answer_perplexity: float
    agreement: float
    divergence: float
    layer_bytes: int


def log_probabilities(stage: Stage, texts: Sequence[Any]) -> Iterator[Tensor]:
    """Next-token log probabilities ``[n - 1, V]`` per text."""
    for text in texts:
        rows = len(text) - 1
        blocks = range(-(-rows // _BLOCK))
        sequence = SequenceRows(0, rows, blocks)
        given = StageInput(torch.from_numpy(text[:-1]), None, (sequence,), tuple(range(rows)))
        yield torch.log_softmax(stage.forward(given).double(), -1)


def measure_model(
    folder: ModelFolder, texts: Sequence[Any], masks: Sequence[Any], modes: Sequence[str]
) -> Iterator[Quality]:
    """Figures of ``modes``, the first of which is the reference."""
    mask = torch.from_numpy(np.concatenate([mask[1:] for mask in masks]))
    wanted = torch.from_numpy(np.concatenate([text[1:] for text in texts]))
    longest = max(map(len, texts))
    exact: Tensor | None = None
    for mode in modes:
        dtype, quantize, kept = MODES[mode]
        stage = Stage.load_layers(
            folder, (0, folder.config.layers), "cpu", dtype, quantize, kv_cache_dtype=kept
        )
        stage.allocate_kv_pool(-(-longest // _BLOCK), _BLOCK)
        found = torch.cat(list(log_probabilities(stage, texts)))
        exact = found if exact is None else exact
        scores = found.gather(1, wanted[:, None])[:, 0]
        yield Quality(
            mode,
            round(math.exp(-float(scores.mean())), 4),
            round(math.exp(-float(scores[mask].mean())), 4),
            round(float((found.argmax(1) == exact.argmax(1)).double().mean()), 4),
            round(float((exact.exp() * (exact - found)).sum(1).mean()), 6),
            _layer_bytes(folder, dtype, quantize),
        )


def _layer_bytes(folder: ModelFolder, dtype: DTypeChoice, quantize: Quantize) -> int:
    """Weight bytes of a middle layer."""
    middle = folder.config.layers // 2
    stage = Stage.load_layers(folder, (middle, middle + 1), "cpu", dtype, quantize=quantize)
    return stage.weight_bytes


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, nargs="*", metavar="TEXT")
    parser.add_argument("--model", type=Path, default=FOLDER, help="a folder or a GGUF file")
    parser.add_argument("--tokens", type=int, default=220, help="of each text")
    parser.add_argument("--conversations", type=int, default=120, help="held-out ones")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, help="the first is the reference")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as beside:
        folder = find_model(str(arguments.model), unpack_into=Path(beside)).path
        if arguments.texts:
            own = Tokenizer.open(folder)
            read = (path.read_text(encoding="utf-8") for path in arguments.texts)
            texts = [np.array(own.encode(text)[: arguments.tokens]) for text in read]
            masks = [np.ones(len(text), bool) for text in texts]
        else:
            tokenizer = load_tokenizer(folder)
            held_out = select_conversations("held_out", arguments.conversations, arguments.seed)
            texts = encode_conversations(tokenizer, held_out)
            masks = [mark_answers(tokenizer, text) for text in texts]
        opened, modes = ModelFolder.open(folder), arguments.modes or list(MODES)
        rows = [asdict(row) for row in measure_model(opened, texts, masks, modes)]
    if arguments.json:
        print(json.dumps({"tokens": sum(map(len, texts)), "modes": rows}, indent=2))
        return
    print(f"{'mode':20} {'ppl':>8} {'answers':>8} {'same token':>10} {'KL nats':>9} {'layer':>9}")
    for row in rows:
        print(
            f"{row['mode']:20} {row['perplexity']:8.4f} {row['answer_perplexity']:8.4f} "
            f"{row['agreement']:10.2%} {row['divergence']:9.6f} {row['layer_bytes']:9}"
        )


if __name__ == "__main__":
    main()
