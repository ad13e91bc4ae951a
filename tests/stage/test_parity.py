"""The decoder gives transformers' results: every family, every rope, whole and split."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.stage.batch import SequenceRows
from tests.support.models import MakeModel
from tests.support.stage import Reference, Ring

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 24}),
    "llama no groups": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    ),
    "llama yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            },
            "max_position_embeddings": 256,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2 yarn scaled": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e6,
                "attention_factor": 1.3,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            },
            "max_position_embeddings": 128,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 tied biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 yarn mscale": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e6,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
            "max_position_embeddings": 128,
        },
    ),
}
BLOCKS = (5, 0, 17, 3, 9, 30, 2, 40, 11, 12, 13, 21, 22, 23, 1, 4, 6, 7, 8, 10)
LENGTH = 75


@pytest.fixture(params=MODELS, scope="module")
def folder(
    request: pytest.FixtureRequest, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    family, overrides = MODELS[request.param]
    made = tmp_path_factory.mktemp("model")
    return make_model(made, family, 3, num_hidden_layers=4, **overrides)


def test_logits_and_greedy_text(
    folder: Path,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    tokens, reference = random_tokens(LENGTH), make_reference(folder)
    expected = reference.logits(tokens)
    greedy = reference.generate(tokens, 64)
    for splits in ((), (2,), (1, 3), (1, 2, 3)):
        ring = make_ring(folder, splits)
        logits = ring.run(tokens, [SequenceRows(0, LENGTH, BLOCKS)])
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert ring.generate(tokens, 64, BLOCKS) == greedy


def test_prefill_in_chunks(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    folder = make_model(tmp_path, "qwen3", 5)
    tokens = random_tokens(LENGTH)
    expected = make_reference(folder).logits(tokens)
    for chunk in (1, 7, 8, 32):
        ring, logits = make_ring(folder, (1,)), []
        for start in range(0, LENGTH, chunk):
            rows = tokens[start : start + chunk]
            logits.append(ring.run(rows, [SequenceRows(start, len(rows), BLOCKS)]))
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("old_spelling", [False, True])
def test_both_spellings_of_rope(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    old_spelling: bool,
) -> None:
    import json

    folder = make_model(tmp_path, "llama", 1, rope_parameters=dict(LLAMA3))
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    if old_spelling:
        scaling = raw.pop("rope_parameters")
        raw["rope_theta"] = scaling.pop("rope_theta")
        raw["rope_scaling"] = scaling
        raw["torch_dtype"] = raw.pop("dtype")
        path.write_text(json.dumps(raw), encoding="utf-8")
    assert ("rope_scaling" in raw) == old_spelling
    tokens = random_tokens(40)
    expected = make_reference(folder).logits(tokens)
    logits = make_ring(folder).run(tokens, [SequenceRows(0, 40, BLOCKS)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_dynamic_scaling_decodes_as_generate_does(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    folder = make_model(tmp_path, "llama", 2, rope_parameters=rope, max_position_embeddings=32)
    prompt = random_tokens(24)
    ring = make_ring(folder, (1,))
    # The prompt crosses the original context of 32 while decoding; a second request changes
    # nothing.
    assert ring.generate(prompt, 40, BLOCKS) == make_reference(folder).generate(prompt, 40)


def test_16_bit_weights_stay_close(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    folder = make_model(tmp_path, "qwen2", 4, dtype="bfloat16")
    tokens = random_tokens(50)
    expected = make_reference(folder).logits(tokens)
    ring = make_ring(folder, (1, 2), dtype="bf16")
    assert [stage.wire_dtype for stage in ring.stages] == ["bf16"] * 3
    logits = ring.run(tokens, [SequenceRows(0, 50, BLOCKS)])
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_cuda_gives_what_the_cpu_gives(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    dtype: str,
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    folder = make_model(tmp_path, "qwen3", 6)
    tokens = random_tokens(50)
    rows = [SequenceRows(0, 50, BLOCKS)]
    expected = make_ring(folder, (1,)).run(tokens, rows)
    ring = make_ring(folder, (1,), dtype=dtype, device="cuda:0")
    logits = ring.run(tokens, rows).cpu()
    if dtype == "f32":
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
        assert ring.generate(tokens, 64, BLOCKS, chunk=16) == make_ring(folder).generate(
            tokens, 64, BLOCKS
        )
    else:
        assert (logits - expected).abs().mean() < 0.05 * expected.std()
