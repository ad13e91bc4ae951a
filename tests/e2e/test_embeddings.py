"""Embeddings of two processes, one of which has to fetch its layers, are those of one stage."""

import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from molink.stage.batch import SequenceRows
from molink.text.tokenizer import Tokenizer
from tests.support.models import MakeModel, make_embedding_model
from tests.support.processes import Tools
from tests.support.stage import Ring

TEXTS = [f"{number} foxes of the forest" * (number % 5 + 1) for number in range(40)]


def embed(client: openai.OpenAI, model: str, **fields: Any) -> torch.Tensor:
    answer = client.embeddings.create(model=model, input=TEXTS, **fields)
    return torch.tensor([one.embedding for one in answer.data])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_peers(tmp_path: Path, tools: type[Tools], make_model: MakeModel) -> None:
    folder = make_embedding_model(make_model(tmp_path / "tiny", "qwen3", 3))
    tokenizer, ring, rows = Tokenizer.open(folder), Ring(folder), []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        rows.append(ring.run(ids, [SequenceRows(0, len(ids), range(64))], [len(ids) - 1])[0])
    expected = torch.nn.functional.normalize(torch.stack(rows))
    options = ["--model", str(folder), "--peers", "2", "--dtype", "f32"]
    process = tools.Process(tmp_path / "home", ["demo", *options])
    try:
        status = process.wait_ready()
        assert len(status["pipelines"][0]["stages"]) == 2
        model = str(status["model"])
        with tools.client(process.found().endpoints[1]) as client:
            torch.testing.assert_close(embed(client, model), expected, atol=1e-5, rtol=0)
            with pytest.raises(openai.BadRequestError, match="is an embedding model"):
                client.completions.create(model=model, prompt="x")
            # A lost worker only costs time.
            workers = [worker["pid"] for peer in status["peers"] for worker in peer["workers"]]
            os.kill(workers[-1], signal.SIGTERM)
            found = embed(client, model, encoding_format="float", timeout=120)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    finally:
        process.stop()
