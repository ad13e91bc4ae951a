"""Bytes and operations of passes, counted by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.stage_cost import StageCost

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 64, 96, 4, 2, 16, 320
ATTENTION = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
MLP = 3 * HIDDEN * INNER
TABLE = VOCABULARY * HIDDEN


def work(folder: Path, layers: tuple[int, int], weight_bytes: int) -> StageCost:
    return StageCost(ModelFolder.open(folder).config, layers, "f32", weight_bytes)


@pytest.mark.parametrize(
    ("layers", "tied", "held", "read"),
    [
        ((1, 2), False, 0, 0),
        ((0, 1), False, 1, 0),
        ((2, 3), False, 1, 1),
        ((0, 3), False, 2, 1),
        ((0, 3), True, 1, 1),
        ((0, 1), True, 1, 0),
    ],
)
def test_a_decode_row_reads_all_weights_but_the_embedding(
    make_model: Any, tmp_path: Path, layers: tuple[int, int], tied: bool, held: int, read: int
) -> None:
    folder = make_model(tmp_path, "llama", tie_word_embeddings=tied)
    weights = (layers[1] - layers[0]) * 4 * (ATTENTION + MLP)
    made = work(folder, layers, weights + held * 4 * TABLE)
    kv = (layers[1] - layers[0]) * 2 * KV_HEADS * HEAD_DIM * 4 * 100
    assert made.decode_bytes(100) == weights + read * 4 * TABLE + kv


def test_operations_of_a_chunk(make_model: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama")
    products = 10 * (ATTENTION + MLP) + 2 * HEADS * HEAD_DIM * 55
    assert work(folder, (1, 2), 1).prefill_flops(10) == 2 * products
    assert work(folder, (2, 3), 1).prefill_flops(10) == 2 * (products + TABLE)


def test_windows_bound_what_a_row_attends_to(make_model: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mistral", sliding_window=4)
    made = work(folder, (1, 2), 0)
    assert made.decode_bytes(100) == 2 * KV_HEADS * HEAD_DIM * 4 * 4
    pairs = 1 + 2 + 3 + 7 * 4
    assert made.prefill_flops(10) == 2 * (10 * (ATTENTION + MLP) + 2 * HEADS * HEAD_DIM * pairs)


def test_latents_are_read_once_for_keys_and_values(make_model: Any, tmp_path: Path) -> None:
    made = work(make_model(tmp_path, "deepseek_v3"), (1, 2), 0)
    assert made.decode_bytes(100) == (16 + 48) * 4 * 100


def test_recurrent_layers_read_a_state_and_no_positions(make_model: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3_5_text")
    state = 6 * 12 * 20 + 3 * (2 * 2 * 12 + 6 * 20)
    recurrent, attended = work(folder, (1, 2), 0), work(folder, (2, 3), 0)
    assert recurrent.decode_bytes(100) == recurrent.decode_bytes(9) == 2 * 4 * state
    assert attended.decode_bytes(100) == 2 * KV_HEADS * HEAD_DIM * 4 * 100
    both = work(folder, (1, 3), 0)
    assert both.decode_bytes(100) == recurrent.decode_bytes(1) + attended.decode_bytes(100)
    rows = HIDDEN * (2 * 2 * 12 + 2 * 6 * 20 + 2 * 6) + 6 * 20 * HIDDEN
    assert recurrent.prefill_flops(10) == 2 * 10 * (rows + MLP + 4 * state)


def test_a_shared_expert_counts_for_all_rows(make_model: Any, tmp_path: Path) -> None:
    made = work(make_model(tmp_path, "qwen2_moe", qkv_bias=False), (1, 2), 0)
    met = ATTENTION + 6 * HIDDEN + HIDDEN + 3 * HIDDEN * 64 + 2 * 3 * HIDDEN * 32
    assert made.prefill_flops(1) == 2 * (met + 2 * HEADS * HEAD_DIM)


def test_dense_layers_of_a_mixture_count_whole(make_model: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "glm4_moe", attention_bias=False, n_shared_experts=2)
    experts = ATTENTION + 8 * HIDDEN + (3 + 2) * 3 * HIDDEN * 32
    for layers, met in (((0, 1), ATTENTION + MLP), ((1, 2), experts)):
        assert work(folder, layers, 0).prefill_flops(1) == 2 * (met + 2 * HEADS * HEAD_DIM)


def test_only_chosen_experts_count(make_model: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=1)
    made = work(folder, (1, 2), 0)
    assert made.config.experts is not None
    expert, router = 3 * HIDDEN * made.config.experts.intermediate_size, 4 * HIDDEN
    made = replace(made, weight_bytes=4 * (ATTENTION + router + 4 * expert))
    met = ATTENTION + router + expert
    assert made.prefill_flops(1) == 2 * (met + 2 * HEADS * HEAD_DIM)
    assert made.decode_bytes(1) == pytest.approx(4 * met + 2 * KV_HEADS * HEAD_DIM * 4, abs=4)
