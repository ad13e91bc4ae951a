"""Attention by Triton at its own sizes: which variants are compiled when; and a real card."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from molink.stage.attention import backend_check as probe
from molink.stage.attention.backend_check import create_checked_triton
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.create import create_attention
from molink.stage.batch import SequenceRows
from molink.stage.diagnostics.attention_timing import is_slower
from molink.stage.diagnostics.trial_shapes import USUAL_SHAPES
from molink.stage.kv_pool import KVPool
from tests.support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton

#: Decode rows, drafts and chunks, with few and with many positions.
BATCHES = [
    [(before, count)] * requests
    for before in (0, 130, 1500)
    for count, requests in ((1, 1), (1, 9), (4, 2), (40, 1))
]


@pytest.mark.parametrize("groups", [1, 4, 7])
def test_the_check_compiles_all_variants(
    shape_of: Callable[..., AttentionShape], monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    from molink.stage.attention import triton_attention

    variants: set[tuple[Any, ...]] = set()

    class Noted:
        def __init__(self, name: str) -> None:
            self._name = name
            self._kernel = getattr(triton_attention, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*given: Any, **named: Any) -> None:
                # All other arguments are constants of the model, or not specialized.
                variants.add((self._name, *named.items()))
                if is_run:
                    self._kernel[grid](*given, **named)

            return launch

    for name in ("attend_pages", "reduce_splits"):
        monkeypatch.setattr(triton_attention, name, Noted(name))
    shape, page, dtype = shape_of(groups, kv_heads=1), 16, torch.float32
    is_run = True
    monkeypatch.setattr(probe, "find_triton_problem", lambda: "")
    backend, reason = create_checked_triton(shape, page, dtype, DEVICE)
    assert backend is not None, reason
    checked, is_run = variants.copy(), False
    assert len(checked) == 5
    pool = KVPool(shape, 1, 1, page, dtype, DEVICE)
    for batch in BATCHES:
        sequences = [SequenceRows(before, count, range(100)) for before, count in batch]
        rows = sum(count for _, count in batch)
        heads = torch.empty(rows, groups + 2, 16, device=DEVICE)
        backend.prepare_layers(sequences, page, dtype, DEVICE)(0, heads, pool)
    for rows, blocks in ((1, 4), (1, 400), (9, 400), (600, 400)):
        static = backend.prepare_static(
            rows,
            blocks,
            page,
            dtype,
            lambda count: torch.zeros(count, dtype=torch.int32).to(DEVICE),
        )
        static(0, torch.empty(rows, groups + 2, 16, device=DEVICE), pool)
    assert variants == checked


@pytest.mark.parametrize(
    ("requests", "start", "rows", "expected"),
    [
        (1, 7999, 1, 62),
        (8, 7999, 1, 8),
        (16, 128, 1, 1),
        (64, 128, 1, 1),
        (64, 7999, 1, 1),
        (1, 0, 512, 1),
        (1, 3584, 512, 1),
        (1, 3840, 64, 8),
        (1, 1000, 4, 7),
    ],
)
def test_tiles_are_split_until_they_fill_the_card(
    shape_of: Callable[..., AttentionShape],
    monkeypatch: pytest.MonkeyPatch,
    requests: int,
    start: int,
    rows: int,
    expected: int,
) -> None:
    from molink.stage.attention import triton_attention

    monkeypatch.setattr(triton_attention, "count_processors", lambda _: 132)
    shape, page = shape_of(groups=4, kv_heads=8, head_dim=128), 16
    part = [(0, SequenceRows(start, rows, range(500)))] * requests
    launch = triton_attention.TritonAttention(shape)._make_launch(
        part, page, torch.bfloat16, torch.device("cpu")
    )
    splits = launch.choose_splits(launch.positions, torch.device("cpu"))
    assert splits == expected
    if splits > 1:
        # Output and partial results are few bytes compared with 16-bit keys and values.
        results = splits * launch.rows * shape.groups * (shape.head_dim + 2) * 4
        assert 2 * results <= 0.55 * launch.positions * 2 * shape.head_dim * 2


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    return torch.device("cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("groups", "head_dim"), [(1, 96), (4, 128), (7, 64), (8, 256)])
@pytest.mark.parametrize("block_size", [16, 256])
def test_the_kernels_on_a_card(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    cuda: torch.device,
    dtype: torch.dtype,
    groups: int,
    head_dim: int,
    block_size: int,
) -> None:
    for softcap, sinks in ((0.0, False), (4.0, True)):
        shape = shape_of(
            groups, head_dim=head_dim, windows=(0, 1, 33, 300), softcap=softcap, sinks=sinks
        )
        backend = create_attention("triton", shape, block_size, dtype, cuda)
        tolerance = 3e-2 if dtype.itemsize == 2 else 1e-4
        for mix in (
            [(700, 1), (0, 300), (255, 2), (9, 1)],
            [(255, 1), (256, 1), (0, 1), (257, 1)],
            [(5000, 1)],
            [(3000, 400)],
        ):
            check(backend, shape, mix, block_size, dtype, cuda, atol=tolerance)


@pytest.mark.gpu
def test_a_pool_of_more_elements_than_an_int32_counts(
    shape_of: Callable[..., AttentionShape], cuda: torch.device
) -> None:
    shape, page = shape_of(groups=4, kv_heads=8, head_dim=128), 256
    row = page * 8 * 128
    blocks = (1 << 31) // row + 4
    if torch.cuda.mem_get_info(cuda)[0] < 2 * 2 * blocks * row + (1 << 30):
        pytest.skip("the card has too little free memory")
    pool = KVPool(shape, 1, blocks, page, torch.float16, cuda)
    tables = [[0, 1, 2], [blocks - 1, blocks - 2, blocks - 3]]
    for here, there in zip(*tables, strict=True):
        pool.block_view(here).normal_()
        pool.block_view(there).copy_(pool.block_view(here))
    heads = torch.randn(1, 48, 128, dtype=torch.float16, device=cuda)
    backend = create_attention("triton", shape, page, torch.float16, cuda)
    low, high = (
        backend.prepare_layers([SequenceRows(700, 1, table)], page, torch.float16, cuda)(
            0, heads, pool
        )
        for table in tables
    )
    torch.testing.assert_close(high, low, atol=0, rtol=0)


@pytest.mark.gpu
def test_a_card_uses_them(shape_of: Callable[..., AttentionShape], cuda: torch.device) -> None:
    from molink.stage.attention.triton_attention import TritonAttention

    # Flash takes larger pages only.
    made = create_attention("auto", shape_of(head_dim=64), 16, torch.float16, cuda)
    assert isinstance(made, TritonAttention)
    # Timing works on a card, too; its result depends on the card.
    assert is_slower("triton", "gather", USUAL_SHAPES, torch.float16, cuda) in (True, False)
