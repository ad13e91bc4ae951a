"""Compare a GGUF file in molink and llama.cpp: tokens, perplexity, likely tokens, greedy text.

    python -m tools.compare_llama FILE.gguf TEXT... --llama PATH/llama-server
    python -m tools.compare_llama FILE.gguf README.md --llama … --tokens 400 --dtype f32 bf16

Both read the TEXTs (cut to ``--tokens``) with the same tokens before each place. llama.cpp rounds
rows to 8 bits, molink does not, so nearly equal favourites may differ; their gap is shown. Then
both continue each ``--prompt`` tokens greedily by ``--answer`` tokens; the gap where they part is
shown.

``--their-file`` gives llama.cpp another file, such as the same values as F32 (``llama-quantize
--allow-requantize FILE.gguf F32.gguf F32``), for which it rounds nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import Quantize
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from molink.text.tokenizer import Tokenizer
from tools.measure_quantization import log_probabilities

#: Likely tokens requested first, before all of them.
_LIKELY = 400
_BLOCK = 16
#: Characters per separately tokenized piece.
_PIECE = 97


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """Log probabilities of one token in both, in nats."""

    ours: float
    theirs: float
    same: bool
    #: The gap between each side's favourite and the other's, by its own probabilities.
    our_gap: float
    their_gap: float


@contextmanager
def llama_server(binary: Path, model: Path, context: int) -> Iterator[str]:
    """Run llama-server on one thread; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary), "-m", str(model), "-c", str(context), "--port", str(port)]
    options = ["--host", "127.0.0.1", "-t", "1", "--parallel", "1", "--log-disable"]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as process:
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"llama-server ended with {process.returncode}")


def post_question(url: str, question: dict[str, Any]) -> dict[str, Any]:
    """Post a question to llama-server."""
    request = urllib.request.Request(
        url, json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def same_tokens(url: str, tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, int]:
    """Count texts and pieces with equal token ids; return matches and total."""
    pieces = [text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE)]
    same = 0
    for text in (*texts, *pieces):
        asked = {"content": text, "add_special": False, "parse_special": True}
        same += post_question(f"{url}/tokenize", asked)["tokens"] == tokenizer.encode(
            text, special=False
        )
    return same, len(texts) + len(pieces)


def compare_tokens(
    url: str, ids: list[int], ours: dict[str, Tensor]
) -> Iterator[tuple[str, TokenComparison]]:
    """Compare each token but the first, by dtype; ``ours`` is ``[tokens - 1, V]``."""
    for index, token in enumerate(ids[1:]):
        rows = {dtype: found[index] for dtype, found in ours.items()}
        wanted = {token, *(int(row.argmax()) for row in rows.values())}
        theirs = their_probabilities(url, ids[: index + 1], wanted)
        if not theirs:
            continue  # llama.cpp would end the text here
        there = max(theirs, key=lambda one: theirs[one])
        for dtype, row in rows.items():
            here = int(row.argmax())
            yield (
                dtype,
                TokenComparison(
                    float(row[token]),
                    theirs[token],
                    here == there,
                    float(row[here] - row[there]),
                    theirs[there] - theirs[here],
                ),
            )


def their_probabilities(url: str, ids: list[int], wanted: set[int]) -> dict[int, float]:
    """llama.cpp's log probabilities after ``ids``, including the wanted tokens."""
    for count in (_LIKELY, 1 << 30):
        asked = {"prompt": ids, "n_predict": 1, "n_probs": count, "temperature": 0}
        reply = post_question(url + "/completion", asked | {"cache_prompt": True})
        listed = reply.get("completion_probabilities") or [{"top_logprobs": ()}]
        found = {entry["id"]: entry["logprob"] for entry in listed[0]["top_logprobs"]}
        if not found or wanted <= found.keys():
            break
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """Equal greedy tokens, their number, and the gap where they part (nats, our distribution)."""

    same: int
    count: int
    gap: float


def compare_answers(
    url: str, stage: Stage, ids: list[int], options: argparse.Namespace, ends: Sequence[int]
) -> Iterator[Answer]:
    """Continue each part of ``ids`` with both."""
    length, count = options.prompt, options.answer
    for begin in range(0, len(ids) - length + 1, length):
        prompt = ids[begin : begin + length]
        ours = decode_greedily(stage, prompt, count, ends)
        asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "return_tokens": True}
        theirs = post_question(url + "/completion", asked)["tokens"]
        # llama.cpp omits the end token.
        pairs = zip(ours, [*theirs, None], strict=False)
        same, gap = 0, 0.0
        for (mine, logits), other in pairs:
            if mine == other or (other is None and mine in ends):
                same += 1
                continue
            rival = other if other is not None else max(ends, key=lambda one: float(logits[one]))
            gap = float(logits[mine] - logits[rival])
            break
        yield Answer(same, len(ours), gap)


def compare_file(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures."""
    model = ModelFolder.open(import_gguf(options.file, folder, NullCounter(), threading.Event()))
    tokenizer = Tokenizer.open(model.path)
    room = max(options.tokens, options.prompt + options.answer)
    stages = {dtype: whole_model(model, room, dtype, options.quantize) for dtype in options.dtype}
    texts = [path.read_text(encoding="utf-8") for path in options.texts]
    read: dict[str, list[TokenComparison]] = {dtype: [] for dtype in stages}
    written: dict[str, list[Answer]] = {dtype: [] for dtype in stages}
    with llama_server(options.llama, options.their_file or options.file, room + 8) as url:
        same, count = same_tokens(url, tokenizer, texts)
        for text in texts:
            ids = tokenizer.encode(text)[: options.tokens]
            given = [torch.tensor(ids).numpy()]
            ours = {dtype: next(log_probabilities(stage, given)) for dtype, stage in stages.items()}
            for dtype, place in compare_tokens(url, ids, ours):
                read[dtype].append(place)
            for dtype, stage in stages.items():
                written[dtype] += compare_answers(url, stage, ids, options, tokenizer.eos_ids)
    figures: dict[str, Any] = {"texts with the same tokens": f"{same} of {count}"}
    for dtype in stages:
        figures |= {f"{dtype}: {name}": one for name, one in _read(read[dtype]).items()}
        figures |= {
            f"{dtype}: {name}": one for name, one in _format_figures(written[dtype]).items()
        }
    return figures


def _read(found: Sequence[TokenComparison]) -> dict[str, Any]:
    differing = [place for place in found if not place.same]
    ours, theirs = (
        math.exp(-sum(values) / len(found))
        for values in ([one.ours for one in found], [one.theirs for one in found])
    )
    return {
        "places": len(found),
        "same favourite": f"{1 - len(differing) / len(found):.2%}",
        "largest gap where not (ours, theirs)": (
            round(max((place.our_gap for place in differing), default=0.0), 4),
            round(max((place.their_gap for place in differing), default=0.0), 4),
        ),
        "perplexity": round(ours, 4),
        "llama.cpp's": round(theirs, 4),
        "apart by": f"{ours / theirs - 1:+.2%}",
    }


def _format_figures(found: Sequence[Answer]) -> dict[str, Any]:
    parted = [one for one in found if one.same < one.count]
    return {
        "same greedy texts": f"{len(found) - len(parted)} of {len(found)}",
        "tokens before they part": [one.same for one in parted],
        "gap there, nats": [round(one.gap, 4) for one in parted],
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--llama", type=Path, required=True, help="llama-server")
    parser.add_argument("--their-file", type=Path, help="file for llama.cpp  [FILE]")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=50, help="tokens per prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of a greedy answer")
    parser.add_argument("--dtype", nargs="+", default=["auto"])
    parser.add_argument("--quantize", default="none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, figure in compare_file(options, Path(folder)).items():
            print(f"{name:44} {figure}", flush=True)


def whole_model(folder: ModelFolder, room: int, dtype: DTypeChoice, quantize: Quantize) -> Stage:
    """All layers of a model in one stage, with room for the KV of ``room`` tokens."""
    stage = Stage.load_layers(folder, (0, folder.config.layers), "cpu", dtype, quantize=quantize)
    stage.allocate_kv_pool(-(-room // _BLOCK), _BLOCK)
    return stage


def next_logits(stage: Stage, tokens: Sequence[int], start: int) -> Tensor:
    """Logits ``[V]`` after ``tokens``; those before ``start`` are computed already."""
    rows = torch.tensor(tokens[start:])
    blocks = range(-(-len(tokens) // _BLOCK))
    sequence = SequenceRows(start, len(rows), blocks)
    return stage.forward(StageInput(rows, None, (sequence,), (len(rows) - 1,)))[0]


def decode_greedily(
    stage: Stage, prompt: Sequence[int], count: int, ends: Collection[int]
) -> list[tuple[int, Tensor]]:
    """Up to ``count`` greedy tokens and logits, ending with the first of ``ends``."""
    tokens, start, found = list(prompt), 0, list[tuple[int, Tensor]]()
    while len(found) < count and not (found and found[-1][0] in ends):
        logits = next_logits(stage, tokens, start)
        start = len(tokens)
        tokens.append(int(logits.argmax()))
        found.append((tokens[-1], logits))
    return found


if __name__ == "__main__":
    main()
