"""A real model's GGUF file gives transformers' results; the two implementations share no code."""

import threading
from pathlib import Path

import pytest
import torch

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.stage.batch import SequenceRows
from molink.text.tokenizer import Tokenizer
from tests.support.stage import Ring
from tools.fetch_smollm2 import fetch

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = range(64)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_logits_and_text(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = fetch(tmp_path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    found = model.load_state_dict(read["tensors"], strict=False)
    assert found.missing_keys in ([], ["lm_head.weight"])  # it is tied to the embedding
    model.eval()
    folder = import_gguf(path, tmp_path, NullCounter(), threading.Event())
    tokenizer = Tokenizer.open(folder)
    for text in (TEXT, *TEXT.split()):
        assert tokenizer.encode(text) == theirs.encode(text)
    ids = tokenizer.encode(TEXT)[:200]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
        answer = model.generate(
            torch.tensor([ids]),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    greedy = answer[0, len(ids) :].tolist()
    for splits in ((), (11, 20)):
        ring = Ring(folder, splits, avoid=("compiled-linear",))
        logits = ring.run(ids, [SequenceRows(0, len(ids), BLOCKS)])
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
        assert ring.generate(ids, 64, BLOCKS) == greedy
