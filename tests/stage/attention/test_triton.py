"""Paged attention by Triton: on a GPU if there is one, otherwise in Triton's interpreter."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from molink.errors import UsageError
from molink.facts.footprint import PAGED_BYTES
from molink.stage.attention import backend_check as probe
from molink.stage.attention.backend_check import create_checked_triton
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.create import create_attention
from molink.stage.attention.gather import GatherAttention
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool
from tests.support.triton_device import DEVICE, needs_triton, widen_products

pytestmark = needs_triton

MIXES = {
    "decode": [(7, 1), (40, 1), (8, 1), (0, 1)],
    "drafts": [(16, 5), (33, 1), (63, 9), (2, 2)],
    "chunk": [(5, 30), (0, 33)],
    "fused": [(33, 1), (0, 30), (2, 4), (50, 1), (24, 27)],
}


@pytest.fixture(scope="module", autouse=True)
def few_positions_split() -> Iterator[None]:
    """Split tiles even for few positions, and multiply bf16 in the interpreter."""
    from molink.stage.attention import triton_attention as backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_MIN_POSITIONS", 16)
        patch.setattr(backend, "_POSITIONS_PER_LINE", 1)
        if DEVICE.type == "cpu":
            widen_products(patch)
        yield


def make_backend(shape: AttentionShape) -> Any:
    from molink.stage.attention.triton_attention import TritonAttention

    return TritonAttention(shape)


@pytest.mark.parametrize("chunked", [False, True])
def test_every_feature_at_once(
    check: Callable[..., None], shape_of: Callable[..., AttentionShape], chunked: bool
) -> None:
    common = {"softcap": 2.0, "scale": 0.4, "groups": 3, "sinks": True, "chunked": chunked}
    for mix in MIXES.values():
        shape = shape_of(windows=(0, 1, 5), **common)
        check(make_backend(shape), shape, mix, device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_types_and_head_sizes(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    dtype: torch.dtype,
    atol: float,
    head_dim: int,
) -> None:
    shape = shape_of(groups=2, kv_heads=1, head_dim=head_dim)
    check(make_backend(shape), shape, [(40, 1), (20, 9)], 16, dtype, DEVICE, atol=atol)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize("mix", MIXES)
def test_kv_in_8_bits(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    mix: str,
    dtype: torch.dtype,
    atol: float,
) -> None:
    shape = shape_of(3, head_dim=24, windows=(0, 5), sinks=True, kv_cache_dtype="int8")
    check(make_backend(shape), shape, MIXES[mix], 16, dtype, DEVICE, atol=atol)


def test_a_sink_without_weight_changes_nothing(shape_of: Callable[..., AttentionShape]) -> None:
    shape = shape_of(windows=(5,))
    pool = make_pool(shape, 20, 8)
    # The last rows see nothing of the block of positions that the first row starts in.
    steps = [SequenceRows(50, 30, range(10)), SequenceRows(70, 1, range(10, 20))]
    heads = torch.randn(31, 8, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    sinks = torch.full((4,), -torch.inf, device=DEVICE)
    plain, given = (
        make_backend(replace(shape, sinks=some is not None)).prepare_layers(
            steps, 8, torch.float32, DEVICE
        )(0, heads, pool, some)
        for some in (None, sinks)
    )
    torch.testing.assert_close(given, plain, atol=1e-5, rtol=0)


requests = st.lists(
    st.tuples(st.integers(0, 90), st.one_of(st.integers(1, 9), st.integers(10, 30))),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=6)
@given(
    mix=requests,
    block_size=st.sampled_from([1, 3, 4, 16, 64]),
    window=st.integers(0, 60),
    softcap=st.sampled_from([0.0, 3.0]),
    sinks=st.booleans(),
    chunked=st.booleans(),
    kept=st.sampled_from(["auto", "int8"]),
    groups=st.sampled_from([1, 2, 4, 7, 17]),
    kv_heads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_random_mixes_of_rows(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    mix: list[tuple[int, int]],
    block_size: int,
    window: int,
    softcap: float,
    sinks: bool,
    chunked: bool,
    kept: str,
    groups: int,
    kv_heads: int,
    seed: int,
) -> None:
    bounds = {"windows": (window,), "softcap": softcap, "sinks": sinks, "chunked": chunked}
    shape = shape_of(groups, kv_heads, **bounds, kv_cache_dtype=kept)
    check(make_backend(shape), shape, mix, block_size, device=DEVICE, seed=seed)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("groups", [1, 3, 8, 32, 71])
def test_partial_results_fit_the_memory_plan(groups: int, head_dim: int, itemsize: int) -> None:
    from molink.stage.attention.triton_attention import MAX_PARTS
    from molink.stage.gpu_kernels.attention_kernels import TileSize

    if groups * head_dim > 1 << 14:
        pytest.skip("no model has such heads")
    lines = TileSize.choose(groups, 1 << 10, head_dim, itemsize).lines // groups * groups
    assert MAX_PARTS * lines * (head_dim + 2) * 4 < PAGED_BYTES


def make_pool(shape: AttentionShape, blocks: int, size: int) -> KVPool:
    pool = KVPool(shape, len(shape.windows), blocks, size, torch.float32, DEVICE)
    generator = torch.Generator().manual_seed(0)
    pool._storage.copy_(torch.randn(pool._storage.shape, generator=generator))
    return pool


def test_the_static_form_gives_the_same(shape_of: Callable[..., AttentionShape]) -> None:
    shape = shape_of(groups=3, windows=(0, 7), sinks=True, softcap=5.0)
    pool = make_pool(shape, 30, 4)
    backend = make_backend(shape)
    tables = torch.zeros(4 * (4 + 28), dtype=torch.int32, device=DEVICE)
    static = backend.prepare_static(4, 28, 4, torch.float32, lambda count: tables[:count])
    generator = torch.Generator().manual_seed(1)
    sinks = torch.randn(6, generator=generator).to(DEVICE)
    for lengths in ([100, 3, 0, 41], [7, 11, 2, 0], [111]):
        order = torch.randperm(29, generator=generator).tolist()
        steps = [SequenceRows(length, 1, order[index:]) for index, length in enumerate(lengths)]
        # Padding rows use a block that belongs to no request.
        padding = [SequenceRows(0, 1, (29,))] * (4 - len(steps))
        heads = torch.randn(4, 10, 16, generator=generator).to(DEVICE)
        numbers = torch.tensor(static.pack_tables([*steps, *padding]), dtype=torch.int32)
        tables[: len(numbers)] = numbers
        static.derive_masks()
        for layer in range(2):
            eager = backend.prepare_layers(steps, 4, torch.float32, DEVICE)
            expected = eager(layer, heads[: len(steps)], pool, sinks)
            found = static(layer, heads, pool, sinks)[: len(steps)]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class Traffic(TorchDispatchMode):
    """Counts the bytes that torch operators other than views read and write, and the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.operators = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        result = function(*given, **(named or {}))
        if not function.is_view and "empty" not in str(function):
            self.operators += 1
            results = result if isinstance(result, tuple) else (result,)
            self.nbytes += sum(one.nbytes for one in results if isinstance(one, Tensor))
            if "index_select" in str(function):  # it reads as many bytes as it writes
                self.nbytes += result.nbytes
            else:
                self.nbytes += sum(one.nbytes for one in given if isinstance(one, Tensor))
        return result


def test_a_decode_step_copies_no_kv(
    shape_of: Callable[..., AttentionShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    from molink.stage.attention import triton_attention

    shape = shape_of(groups=4, kv_heads=2, head_dim=16)
    pool = make_pool(shape, 80, 16)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0)).tolist()
    steps = [
        SequenceRows(600, 1, order[:40]),
        SequenceRows(300, 1, order[40:60]),
        SequenceRows(100, 1, order[60:70]),
    ]
    heads = torch.zeros(3, 12, 16, device=DEVICE)
    kv = sum(step.end for step in steps) * 2 * 2 * 16 * 4
    gather = GatherAttention(shape).prepare_layers(steps, 16, torch.float32, DEVICE)
    with Traffic() as copied:
        gather(0, heads, pool)
    assert copied.nbytes > 3 * kv
    launched = []
    for name in ("attend_pages", "reduce_splits"):
        kernel = getattr(triton_attention, name)
        monkeypatch.setattr(triton_attention, name, CountedLaunches(kernel, name, launched.append))
    attend = make_backend(shape).prepare_layers(steps, 16, torch.float32, DEVICE)
    with Traffic() as read:
        attend(0, heads, pool)
    assert read.operators == 0  # torch only allocates the output and partial results
    assert launched == ["attend_pages", "reduce_splits"]


class CountedLaunches:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any, name: str, tell: Callable[[str], None]) -> None:
        self._kernel, self._name, self._tell = kernel, name, tell

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._tell(self._name)

        def launch(*given: Any, **named: Any) -> None:
            with torch.utils._python_dispatch._disable_current_modes():
                self._kernel[grid](*given, **named)

        return launch


def as_cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A fake card without paged flash attention: tensors stay on the tests' device."""
    monkeypatch.setattr(probe, "find_kernel", lambda: None)
    asked = probe._difference
    monkeypatch.setattr(probe, "_difference", lambda *given: asked(*given[:-1], DEVICE))
    return torch.device("cuda:0")


@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_it_is_used_where_flash_is_not(
    monkeypatch: pytest.MonkeyPatch, shape_of: Callable[..., AttentionShape], kept: str
) -> None:
    from molink.stage.attention.triton_attention import TritonAttention

    device = as_cuda(monkeypatch)
    scores = {"softcap": 20.0, "sinks": True, "windows": (0, 30)}
    shape = shape_of(kv_heads=1, **scores, kv_cache_dtype=kept)
    made = create_attention("auto", shape, 16, torch.float32, device)
    assert isinstance(made, TritonAttention)
    avoided = create_attention("auto", shape, 16, torch.float32, device, ("triton-attention",))
    assert isinstance(avoided, GatherAttention)


def test_a_wrong_kernel_means_gather(
    monkeypatch: pytest.MonkeyPatch, shape_of: Callable[..., AttentionShape]
) -> None:
    from molink.stage.attention import triton_attention

    class WithoutWindow(triton_attention.TritonAttention):
        def __init__(self, shape: AttentionShape) -> None:
            super().__init__(replace(shape, windows=(0,)))

    device = as_cuda(monkeypatch)
    monkeypatch.setattr(triton_attention, "TritonAttention", WithoutWindow)
    shape = shape_of(kv_heads=1, windows=(30,))
    assert "off by" in create_checked_triton(shape, 16, torch.float32, device)[1]
    made = create_attention("auto", shape, 16, torch.float32, device)
    assert isinstance(made, GatherAttention)
    with pytest.raises(UsageError, match="use auto or gather"):
        create_attention("triton", shape, 16, torch.float32, device)


def test_without_triton_it_is_absent(
    monkeypatch: pytest.MonkeyPatch, shape_of: Callable[..., AttentionShape]
) -> None:
    monkeypatch.setattr(probe, "find_triton_problem", lambda: "there is no C compiler")
    found, reason = create_checked_triton(shape_of(), 16, torch.float32, torch.device("cuda:0"))
    assert found is None
    assert "no C compiler" in reason
