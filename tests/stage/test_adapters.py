"""Adapters give transformers' results with merged weights: whole, split, in chunks, mixed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.adapted_folder import adapt_model
from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.stage.batch import SequenceRows
from molink.stage.decoder.decoder import HeldWeights
from molink.stage.linear import AdaptedLinear, PlainLinear
from molink.stage.stage import Stage
from tests.support.adapters import ATTENTION, MLP, merge_adapter, stable_scale, write_adapter
from tests.support.gguf_models import write_gguf
from tests.support.models import MakeModel, make_embedding_model
from tests.support.stage import Reference, Ring

BLOCKS = (5, 0, 17, 3, 9, 30, 2, 40, 11, 12)
OTHER_BLOCKS = (6, 7, 8, 10, 13, 14, 15, 16, 18, 19)
#: Tokens of a prompt, and of a greedy answer, which begins two new blocks.
LENGTH, ANSWER = 41, 16
#: Family, fields of its config, targets, and further fields of the adapter's config.
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, (*ATTENTION, *MLP), {}),
    "llama attention": ("llama", {}, ("q_proj", "v_proj"), {"layers": (1, 2)}),
    "phi3 merged": (
        "phi3",
        {"sliding_window": None},
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        {},
    ),
    "gemma3": ("gemma3_text", {}, (*ATTENTION, *MLP), {}),
    "gemma3 that sees": ("gemma3", {}, (*ATTENTION, *MLP), {"layers": (0, 1)}),
    "mixtral attention": ("mixtral", {}, ATTENTION, {}),
    "qwen3_next": ("qwen3_next", {}, ATTENTION, {"layers": (2,)}),
    "lfm2": ("lfm2", {}, ("q_proj", "k_proj", "w1", "w2", "w3"), {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that makes a new folder."""
    return tmp_path_factory.mktemp


def test_rank_and_scale_of_patterns(
    make_model: MakeModel, tmp_path: Path, make_ring: type[Ring], make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:  # fmt: skip
    base = make_model(tmp_path / "base", "qwen2", 3)
    adapter = write_adapter(
        tmp_path / "adapter", base, use_rslora=True, lora_alpha=6,
        rank_pattern={"self_attn.v_proj": 9}, alpha_pattern={"^model.layers.1.mlp.up_proj": 20},
    )  # fmt: skip
    scales = {
        "self_attn.v_proj": stable_scale(6, 9),
        "layers.1.mlp.up_proj": stable_scale(20, 4),
        "": stable_scale(6, 4),
    }
    merged = make_reference(merge_adapter(base, adapter, tmp_path / "merged", scales))
    folder = adapt_model("m", base, {"tuned": adapter}, tmp_path / "into")
    tokens = random_tokens(LENGTH)
    logits = make_ring(folder, (2,)).run(tokens, [SequenceRows(0, LENGTH, BLOCKS, adapter=1)])
    torch.testing.assert_close(logits, merged.logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_text(
    make_model: MakeModel, tmp_path: Path, make_ring: type[Ring], make_reference: type[Reference],
    random_tokens: Callable[..., list[int]], kind: str,
) -> None:  # fmt: skip
    family, fields, targets, settings = KINDS[kind]
    base = make_model(tmp_path / "base", family, 3, **fields)
    adapters, references, tokens = {}, [make_reference(base)], random_tokens(LENGTH)
    for seed, name in enumerate(("first", "second")):
        adapters[name] = write_adapter(tmp_path / name, base, targets, seed, **settings)
        merged = merge_adapter(base, adapters[name], tmp_path / f"merged {name}", {"": 2.0})
        references.append(make_reference(merged))
    folder = adapt_model("m", base, adapters, tmp_path / "into")
    expected = [reference.logits(tokens) for reference in references]
    # Otherwise the test would prove nothing.
    assert not torch.allclose(expected[0], expected[1], atol=0.1)
    assert not torch.allclose(expected[1], expected[2], atol=0.1)
    answers = [reference.generate(tokens, ANSWER) for reference in references]
    for splits in ((), (1, 2)):
        ring = make_ring(folder, splits, blocks=80, states=2)
        for number in range(3):
            logits = ring.run(tokens, [SequenceRows(0, LENGTH, BLOCKS, adapter=number)])
            torch.testing.assert_close(logits, expected[number], atol=1e-4, rtol=0)
            if splits:
                assert _generate(ring, tokens, number, chunk=7) == answers[number]


def _generate(ring: Ring, prompt: list[int], adapter: int, chunk: int) -> list[int]:
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + ANSWER:
        rows = tokens[start : start + chunk]
        given = [SequenceRows(start, len(rows), BLOCKS, adapter=adapter)]
        logits = ring.run(rows, given, [len(rows) - 1])
        start += len(rows)
        if start == len(tokens):
            tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def adapted(make_model: MakeModel, place: Callable[[str], Path]) -> tuple[Path, list[Path]]:
    """A model with two adapters, one of which changes some layers only; and the merged models."""
    at = place("adapted")
    base = make_model(at / "base", "qwen2", 3)
    adapters = {
        "all": write_adapter(at / "all", base, seed=1),
        "some": write_adapter(at / "some", base, ("k_proj", "up_proj"), 2, rank=8, layers=(0, 2)),
    }
    scales = {"all": {"": 2.0}, "some": {"": 1.0}}
    merged = [merge_adapter(base, adapters[n], at / f"merged {n}", scales[n]) for n in adapters]
    return adapt_model("m", base, adapters, at / "into"), [base, *merged]


@pytest.mark.parametrize("splits", [(), (1,)])
def test_mixed_batches(
    adapted: tuple[Path, list[Path]], make_ring: type[Ring], make_reference: type[Reference],
    random_tokens: Callable[..., list[int]], splits: tuple[int, ...],
) -> None:  # fmt: skip
    folder, merged = adapted
    ring, references = make_ring(folder, splits, blocks=80), [make_reference(one) for one in merged]
    # Tokens before the batch, rows in it, and adapter.
    requests = [(30, 1, 1), (0, 33, 0), (3, 1, 2), (20, 11, 1), (12, 1, 0), (7, 4, 2)]
    prompts = [random_tokens(one[0] + one[1], seed) for seed, one in enumerate(requests)]
    tables = [tuple(range(first, first + 10)) for first in range(0, 60, 10)]
    for (before, _, adapter), prompt, table in zip(requests, prompts, tables, strict=True):
        if before:
            ring.run(prompt[:before], [SequenceRows(0, before, table, adapter=adapter)])
    logits = ring.run(
        [
            token
            for one, prompt in zip(requests, prompts, strict=True)
            for token in prompt[one[0] :]
        ],
        [
            SequenceRows(before, rows, table, adapter=adapter)
            for (before, rows, adapter), table in zip(requests, tables, strict=True)
        ],
    )
    expected = [
        references[adapter].logits(prompt)[before:]
        for (before, _, adapter), prompt in zip(requests, prompts, strict=True)
    ]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=0)


def test_16_bit_rows_stay_close(
    adapted: tuple[Path, list[Path]], make_ring: type[Ring], make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:  # fmt: skip
    folder, merged = adapted
    tokens = random_tokens(LENGTH)
    ring = make_ring(folder, (1,), dtype="bf16")
    for number in (1, 2):
        logits = ring.run(tokens, [SequenceRows(0, LENGTH, BLOCKS, adapter=number)])
        expected = make_reference(merged[number]).logits(tokens)
        assert (logits - expected).abs().mean() < 0.05 * expected.std()


def test_quantized_weights_with_an_adapter(
    adapted: tuple[Path, list[Path]], make_ring: type[Ring], random_tokens: Callable[..., list[int]]
) -> None:
    folder, merged = adapted
    tokens = random_tokens(LENGTH)
    rows = [SequenceRows(0, LENGTH, BLOCKS, adapter=1)]
    logits = make_ring(folder, quantize="int8").run(tokens, rows)
    wide = make_ring(folder).run(tokens, rows)
    base = make_ring(merged[0], quantize="int8").run(tokens, rows)
    # The adapter isn't quantized, so the difference is the base's rounding.
    assert (logits - wide).abs().mean() < 0.1 * (base - wide).abs().mean()


def test_an_adapter_of_an_embedding_model(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
) -> None:
    # The names of the base's tensors have no prefix, nor do those of its adapter.
    base = make_embedding_model(make_model(tmp_path / "base", "qwen3", 3))
    adapter = write_adapter(tmp_path / "adapter", base)
    folder = adapt_model("m", base, {"tuned": adapter}, tmp_path / "into")
    merged = merge_adapter(base, adapter, tmp_path / "merged", {"": 2.0})
    tokens, last = random_tokens(LENGTH), [LENGTH - 1]
    for number, other in enumerate((base, merged)):
        rows = [SequenceRows(0, LENGTH, BLOCKS, adapter=number)]
        found = make_ring(folder, (1,)).run(tokens, rows, last)
        expected = make_ring(other).run(tokens, [SequenceRows(0, LENGTH, BLOCKS)], last)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_an_adapter_of_a_model_in_gguf(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    # llama.cpp permutes rows of this family's weights, but an adapter's rows are not permuted.
    base = make_model(tmp_path / "base", "llama", 3)
    write_gguf(base, tmp_path / "base.gguf", exact=tmp_path / "exact")
    unpacked = import_gguf(tmp_path / "base.gguf", tmp_path, NullCounter(), threading.Event())
    adapter = write_adapter(tmp_path / "adapter", base)
    folder = adapt_model("m", unpacked, {"tuned": adapter}, tmp_path / "into")
    tokens = random_tokens(LENGTH)
    merged = merge_adapter(tmp_path / "exact", adapter, tmp_path / "merged", {"": 2.0})
    logits = make_ring(folder).run(tokens, [SequenceRows(0, LENGTH, BLOCKS, adapter=1)])
    torch.testing.assert_close(logits, make_reference(merged).logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_steps_on_a_card(
    adapted: tuple[Path, list[Path]],
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    dtype: str,
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    tokens = random_tokens(LENGTH)
    here, there = make_ring(adapted[0]), make_ring(adapted[0], device="cuda:0", dtype=dtype)
    for number in range(3):
        # A prompt, then single rows, for which the base has graphs.
        starts = [(0, LENGTH - 4), *((start, 1) for start in range(LENGTH - 4, LENGTH))]
        for start, count in starts:
            rows = SequenceRows(start, count, BLOCKS, adapter=number)
            expected, found = (
                ring.run(tokens[start : start + count], [rows]).cpu() for ring in (here, there)
            )
            if dtype == "f32":
                torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
            else:
                assert (found - expected).abs().mean() < 0.05 * expected.std()


def test_a_stage_holds_the_adapters_of_its_layers(adapted: tuple[Path, list[Path]]) -> None:
    folder = ModelFolder.open(adapted[0])
    first, second = (Stage.load_layers(folder, layers, dtype="f32") for layers in ((0, 1), (1, 3)))
    found = [stage._decoder.blocks[0].mixer.qkv for stage in (first, second)]
    assert all(isinstance(one, AdaptedLinear) for one in found)
    assert [sorted(one.updates) for one in found] == [[1, 2], [1]]
    assert isinstance(second._decoder.blocks[1].mixer.qkv, AdaptedLinear)
    plain = Stage.load_layers(ModelFolder.open(adapted[1][0]), (0, 1), dtype="f32")
    stored = sum(
        span.nbytes
        for name, span in folder.tensors.items()
        if ".lora_" in name and name.startswith("model.layers.0.")
    )
    assert first.weight_bytes - plain.weight_bytes == stored
    facts, before = (
        folder.placement_facts("m"),
        ModelFolder.open(adapted[1][0]).placement_facts("m"),
    )
    assert facts.layer_bytes - before.layer_bytes == stored
    held = HeldWeights.from_decoder(second._decoder, (1, 3), (2, 3))
    again = Stage.load_layers(folder, (2, 3), dtype="f32", held=held)
    assert again._decoder.blocks[0].mixer.qkv is second._decoder.blocks[1].mixer.qkv


def test_no_adapter_costs_no_wrapper(
    adapted: tuple[Path, list[Path]], make_ring: type[Ring]
) -> None:
    ring = make_ring(adapted[1][0])
    assert isinstance(ring.stages[0]._decoder.blocks[0].mixer.qkv, PlainLinear)
