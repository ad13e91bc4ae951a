"""A GGUF file in molink and in llama.cpp: the same tokens, the same likely next ones, perplexity.

    python -m tools.compare_llama FILE.gguf TEXT... --llama PATH/llama-server
    python -m tools.compare_llama FILE.gguf README.md --llama … --tokens 400 --dtype bf16

Both read the TEXTs (files; each is cut to ``--tokens``) with the same tokens before each place, so
a difference at one place doesn't change the next ones. llama.cpp rounds what it multiplies with
weights in blocks to 8 bits, molink doesn't: where the two best tokens are about equally likely, the
better one may differ. Shown are the places where it does, with how far the two are apart.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molink.checkpoint.folder import ModelFolder
from molink.checkpoint.source import Uncounted
from molink.checkpoint.unpacking import unpacked
from molink.stage.stage import Stage
from molink.text.tokenizer import Tokenizer
from tools.measure_quantization import log_probabilities

_BLOCK = 16
#: Pieces that the texts are tokenized in, beside whole.
_PIECE = 97


@dataclass(frozen=True, slots=True)
class Place:
    """What both say of one token of a text, as log probabilities in nats."""

    ours: float
    theirs: float
    same: bool
    #: In each one's own distribution: how far the other's favourite is below its own.
    our_gap: float
    their_gap: float


@contextmanager
def llama_server(binary: Path, model: Path, context: int) -> Iterator[str]:
    """A llama-server with the model, on one thread; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary), "-m", str(model), "-c", str(context), "--port", str(port)]
    options = ["--host", "127.0.0.1", "-t", "1", "--parallel", "1", "--log-disable"]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as process:
        try:
            _wait(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"llama-server ended with {process.returncode}")


def ask(url: str, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of a llama-server."""
    request = urllib.request.Request(
        url, json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def same_tokens(url: str, tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, int]:
    """How many of the texts, and of pieces of them, have the same ids in both; of how many."""
    pieces = [text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE)]
    same = 0
    for text in (*texts, *pieces):
        asked = {"content": text, "add_special": False, "parse_special": True}
        same += ask(f"{url}/tokenize", asked)["tokens"] == tokenizer.encode(text, special=False)
    return same, len(texts) + len(pieces)


def places(url: str, ids: list[int], ours: Tensor) -> Iterator[Place]:
    """What both say of each token but the first; ``ours`` is ``[tokens - 1, vocabulary]``."""
    for index, mine in enumerate(ours):
        asked = {"prompt": ids[: index + 1], "n_predict": 1, "n_probs": len(mine)}
        reply = ask(f"{url}/completion", asked | {"temperature": 0, "cache_prompt": True})
        if "completion_probabilities" not in reply:
            continue  # it would end the text here, and says no more
        theirs = torch.full_like(mine, -math.inf)
        for entry in reply["completion_probabilities"][0]["top_logprobs"]:
            theirs[entry["id"]] = entry["logprob"]
        here, there, token = int(mine.argmax()), int(theirs.argmax()), ids[index + 1]
        yield Place(
            float(mine[token]),
            float(theirs[token]),
            here == there,
            float(mine[here] - mine[there]),
            float(theirs[there] - theirs[here]),
        )


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures."""
    model = ModelFolder.open(unpacked(options.file, folder, Uncounted(), threading.Event()))
    tokenizer = Tokenizer.open(model.path)
    stage = Stage.load(
        model, (0, model.config.layers), "cpu", options.dtype, quantize=options.quantize
    )
    stage.allocate(-(-options.tokens // _BLOCK), _BLOCK)
    texts = [path.read_text(encoding="utf-8") for path in options.texts]
    found: list[Place] = []
    with llama_server(options.llama, options.file, options.tokens + 8) as url:
        same, count = same_tokens(url, tokenizer, texts)
        for text in texts:
            ids = tokenizer.encode(text)[: options.tokens]
            (ours,) = log_probabilities(stage, [torch.tensor(ids, dtype=torch.int32).numpy()])
            found += places(url, ids, ours)
    differing = [place for place in found if not place.same]
    return {
        "texts with the same tokens": f"{same} of {count}",
        "places": len(found),
        "same favourite": round(1 - len(differing) / len(found), 5),
        "largest gap where not (ours, theirs)": (
            round(max((place.our_gap for place in differing), default=0.0), 4),
            round(max((place.their_gap for place in differing), default=0.0), 4),
        ),
        "perplexity": round(math.exp(-sum(place.ours for place in found) / len(found)), 4),
        "llama.cpp's": round(math.exp(-sum(place.theirs for place in found) / len(found)), 4),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--llama", type=Path, required=True, help="llama-server")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, figure in compare(options, Path(folder)).items():
            print(f"{name:38} {figure}")


if __name__ == "__main__":
    main()
