"""``tools.compare_card`` on a CPU, with a small model and without llama.cpp."""

import json
from pathlib import Path

import pytest
import torch

from tools import compare_card, make_bench_model
from tools.compare_card import Case, LlamaPrograms

DENSE = make_bench_model.Shape(64, 4, 2, 16, 96)
MIXTURE = make_bench_model.Shape(64, 4, 2, 16, 32, experts=4, active=2)


class FakePrograms(LlamaPrograms):
    """Replaces llama.cpp's programs; their output is fixed."""

    def _run_program(self, program: str, model: Path, options: list[str]) -> str:
        assert model.is_file()
        if program == "llama-bench":
            return json.dumps([{"n_prompt": n, "avg_ts": 1e3} for n in compare_card._PROMPTS])
        rows = [int(one) for one in options[options.index("-npl") + 1].split(",")]
        lines = [json.dumps({"pl": one, "speed_tg": 50.0 * one}) for one in rows]
        return "\n".join(["main: decoding", *lines])


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_both_sides_are_timed_on_the_same_steps(
    shape: make_bench_model.Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_ROWS", (1, 4)), ("_DEEP", 300), ("_DEEP_ROWS", (2,))):
        monkeypatch.setattr(compare_card, name, value)
    monkeypatch.setattr(compare_card, "_PROMPTS", (8, 16))
    monkeypatch.setattr(make_bench_model, "VOCABULARY", 512)
    tensors = dict(make_bench_model.make_tensors(1, shape))
    tokens = make_bench_model.write_tokenizer(tmp_path, 512)
    path = tmp_path / "model-f16.gguf"
    make_bench_model.write_gguf(path, tensors, tokens, 1, shape)
    cpu = torch.device("cpu")
    times, weights = compare_card.compare_file(path, FakePrograms(tmp_path, cpu), cpu, 2)
    assert 0 < weights < 2 * path.stat().st_size
    assert times.llama[Case(4, 128)] == [20.0, 20.0]
    assert times.llama[Case(16)] == [16.0, 16.0]
    found = times.describe({Case(1, 128): 0.5})
    assert [one["step"] for one in found] == [
        "1 at 128",
        "4 at 128",
        "2 at 300",
        "prompt of 8",
        "prompt of 16",
    ]
    assert all(one["ratio"] > 0 and len(one["ratios"]) == 2 for one in found)
    assert [one["floor_ms"] for one in found] == [0.5, None, None, None, None]
