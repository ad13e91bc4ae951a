"""Decode steps in static buffers give the same results as others; on a GPU, as CUDA graphs.

On a CPU a graph is the work itself, with the same code for padding, loading and choosing.
"""

import gc
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from molink.checkpoint.model_folder import ModelFolder
from molink.stage import stage as stages
from molink.stage.attention.base import AttentionBackend, AttentionShape
from molink.stage.attention.flash import FlashAttention
from molink.stage.attention.gather import GatherAttention
from molink.stage.batch import MtpInput, SequenceRows, StageInput
from molink.stage.graphs import buckets
from molink.stage.graphs import decode_graphs as graphs
from molink.stage.graphs.buckets import MAX_RUNS_BEFORE_CAPTURE, row_bucket
from molink.stage.kv_pool import KVPool
from molink.stage.layer_pass import LocatedRows
from molink.stage.sampling.sampler import SampleRow, sample_tokens
from molink.stage.stage import Stage
from molink.wire.messages.data_plane import SamplingParams
from tests.support.models import MakeModel
from tests.support.stage import Ring
from tests.support.triton_device import needs_triton

#: Enough steps, with idle time in between, to capture and replay each bucket.
STEPS = 6
MIXES = {"one": [5], "three": [30, 2, 17], "five": [1, 2, 3, 4, 5], "long": [300, 260]}


class WorkItself:
    """Replaces :class:`CudaGraphCapturer`: a graph calls the work itself."""

    nbytes = 0

    def __init__(
        self,
        device: torch.device,
        eager: float = 2.0,
        replayed: float = 1.0,
        fails_after: int = 99,
        fit: int = 99,
        stale_after: int = 99,
    ) -> None:
        self.seconds_by_turn = [eager, replayed]
        self.fails_after, self.fit, self.stale_after = fails_after, fit, stale_after
        self.captured = 0
        self.replayed = 0
        #: The captured graphs that are alive.
        self.graphs: WeakSet[Callable[..., Any]] = WeakSet()

    def capture_work(self, work: Callable[..., Any], max_bytes: int) -> Callable[..., Any] | None:
        assert max_bytes >= 1 << 20
        self.captured += 1
        stale = self.captured > self.stale_after
        if self.captured > self.fails_after:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.captured > self.fit:
            return None

        def replay() -> None:
            self.replayed += 1
            if not stale:  # a stale graph leaves the previous step's results
                work()

        self.graphs.add(replay)
        return replay

    def time_work(self, work: Callable[..., Any]) -> float:
        work()
        self.seconds_by_turn.reverse()
        return self.seconds_by_turn[1]


@pytest.fixture(autouse=True)
def nothing_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps that occurred are captured."""
    monkeypatch.setattr(buckets, "_EXPECTED_SHAPES", ())


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``captures(**options)``: stages get graphs from now on; returns all fake capturers."""
    made = []

    def prepare(**options: int) -> list[Any]:
        def make(device: torch.device) -> WorkItself:
            made.append(WorkItself(device, **options))
            return made[-1]

        monkeypatch.setattr(Stage, "_may_have_graphs", True)
        monkeypatch.setattr(stages, "CudaGraphCapturer", make)
        return made

    return prepare


def idle(ring: Ring) -> None:
    """Idle time of the stages."""
    for stage in ring.stages:
        while stage.capture_next_graph():
            pass


def decode(
    ring: Ring, prompts: list[list[int]], tables: list[list[int]], tokens: list[int], drafts: int
) -> Tensor:
    """Logits of a few decode steps after the prompts, one row of each.

    ``drafts``, all of which are right, follow the first prompt's row.
    """
    for prompt, table in zip(prompts, tables, strict=True):
        ring.run(prompt, [SequenceRows(0, len(prompt), table)], [])
    found = []
    for step in range(STEPS):
        rows = [
            SequenceRows(len(prompt) + step * count, count, table)
            for prompt, table, count in zip(
                prompts, tables, [1 + drafts, *[1] * len(prompts)], strict=False
            )
        ]
        found.append(ring.run(tokens[step : step + drafts + len(rows)], rows).cpu())
        idle(ring)
    return torch.stack(found)


def run_both(
    make_ring: type[Ring],
    folder: Path,
    random_tokens: Callable[..., list[int]],
    lengths: list[int],
    prepare: Callable[..., Any],
    drafts: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, Ring]:
    """Run the same steps with graphs and without."""
    prompts = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    size = options.get("block_size", 8)
    tables, free = [], list(range(200))
    for prompt in prompts:
        count = -(-(len(prompt) + STEPS * (1 + drafts)) // size)
        tables.append(free[: 2 * count : 2])
        del free[: 2 * count : 2]
    options |= {"blocks": 200}
    tokens = random_tokens(40, 99)
    plain = decode(make_ring(folder, (1,), **options), prompts, tables, tokens, drafts)
    prepare()
    ring = make_ring(folder, (1,), **options)
    return plain, decode(ring, prompts, tables, tokens, drafts), ring


def check_rounding(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """``found`` is as close to the float32 model of the same weights as ``plain`` is."""
    scale = float(exact.std())
    errors = [(one - exact).abs() / scale for one in (found, plain)]
    for worst, tolerance in ((torch.max, 1.5), (lambda error: error.square().mean().sqrt(), 1.2)):
        of_found, of_plain = (float(worst(error)) for error in errors)
        assert of_found <= tolerance * of_plain + 1e-3


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_padded_steps_give_the_same(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    mix: str,
    family: str,
) -> None:
    folder = make_model(tmp_path, family, 3)
    made = []
    plain, replayed, ring = run_both(
        make_ring, folder, random_tokens, MIXES[mix], lambda: made.append(captures())
    )
    torch.testing.assert_close(replayed, plain, atol=1e-4, rtol=0)
    # Each stage captures the graph of one row at first, and then the steps' own size.
    alone = mix == "one"
    assert [each.captured for each in made[0]] == ([1, 1] if alone else [2, 2])
    assert all(each.replayed >= 5 for each in made[0])
    assert all(stage.graph_bytes > 0 for stage in ring.stages)


@pytest.mark.parametrize("backend", ["gather", pytest.param("triton", marks=needs_triton)])
def test_steps_with_kv_in_8_bits(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    def create(_: str, shape: AttentionShape, *given: object) -> AttentionBackend:
        from molink.stage.attention.triton_attention import TritonAttention

        return (TritonAttention if backend == "triton" else GatherAttention)(shape)

    monkeypatch.setattr(stages, "create_attention", create)
    folder, made = make_model(tmp_path, "qwen3", 3), []
    plain, replayed, ring = run_both(
        make_ring,
        folder,
        random_tokens,
        MIXES["three"],
        lambda: made.append(captures()),
        kv_cache_dtype="int8",
    )
    torch.testing.assert_close(replayed, plain, atol=1e-4, rtol=0)
    assert all(each.replayed >= 5 for each in made[0])
    assert all(stage._pool.layer_scales(0) is not None for stage in ring.stages)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_padded_steps_round_as_others(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    dtype: str,
) -> None:
    stored = {"bf16": "bfloat16", "f16": "float16"}[dtype]
    folder = make_model(tmp_path, "qwen3", 3, dtype=stored)
    given = make_ring, folder, random_tokens, MIXES["five"]
    exact, *_ = run_both(*given, lambda: None, dtype="f32")
    plain, replayed, _ = run_both(*given, captures, dtype=dtype)
    check_rounding(replayed, plain, exact)
    with pytest.raises(AssertionError):
        check_rounding(replayed.roll(1, dims=1), plain, exact)
    with pytest.raises(AssertionError):
        check_rounding(plain + 1.5 * (plain - exact), plain, exact)


@needs_triton
def test_short_prompts_are_steps_with_drafts(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from molink.stage.attention.triton_attention import TritonAttention

    folder = make_model(tmp_path, "qwen3", 1)
    captures()
    monkeypatch.setattr(stages, "create_attention", lambda _, shape, *given: TritonAttention(shape))
    ring = make_ring(folder, blocks=200)
    for count in (3, 4):
        ring.run(random_tokens(count), [SequenceRows(0, count, (count,))])
    idle(ring)
    assert {bucket.rows for bucket in ring.stages[0]._graphs._graphs} == {1, 4}


def test_flash_on_fixed_pages(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    paged: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_model(tmp_path, "qwen2", 3)

    def flash(
        name: str, shape: AttentionShape, *given: int | torch.device | torch.dtype
    ) -> FlashAttention:
        return FlashAttention(shape, paged)

    def prepare() -> None:
        captures()
        monkeypatch.setattr(stages, "create_attention", flash)

    plain, replayed, _ = run_both(make_ring, folder, random_tokens, [30, 2, 17], prepare)
    torch.testing.assert_close(replayed, plain, atol=1e-4, rtol=0)


@needs_triton
def test_one_graph_reads_pages_of_all_lengths(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from molink.stage.attention.triton_attention import TritonAttention

    folder = make_model(tmp_path, "gemma2", 2)
    made = []

    def prepare() -> None:
        made.append(captures())
        monkeypatch.setattr(
            stages, "create_attention", lambda _, shape, *given: TritonAttention(shape)
        )

    plain, replayed, ring = run_both(make_ring, folder, random_tokens, [250, 5], prepare)
    torch.testing.assert_close(replayed, plain, atol=1e-4, rtol=0)
    # The longest request outgrows the narrowest table, but needs no other graph.
    assert [each.captured for each in made[0]] == [2, 2]
    context = ring.stages[0].config.max_model_len
    assert all(
        {bucket.blocks for bucket in stage._graphs._graphs} == {-(-context // 8)}
        for stage in ring.stages
    )


@needs_triton
@pytest.mark.parametrize("family", ["gemma2", "phi3"])
@pytest.mark.parametrize("backend", ["triton", "flash", "gather"])
def test_drafts_have_graphs_where_attention_reads_pages(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    paged: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    backend: str,
) -> None:
    from molink.stage.attention.triton_attention import TritonAttention

    if family == "gemma2" and backend == "flash":
        pytest.skip("flash has no softcap")

    def create(_: str, shape: AttentionShape, *given: object) -> AttentionBackend:
        if backend == "flash":
            return FlashAttention(shape, paged)
        return (TritonAttention if backend == "triton" else GatherAttention)(shape)

    folder, made = make_model(tmp_path, family, 2), []

    def prepare() -> None:
        made.append(captures())
        monkeypatch.setattr(stages, "create_attention", create)

    plain, replayed, ring = run_both(make_ring, folder, random_tokens, [30, 17], prepare, drafts=3)
    torch.testing.assert_close(replayed, plain, atol=1e-4, rtol=0)
    # Five rows of two requests use a graph of eight rows, as five requests would.
    reads_pages = backend != "gather"
    assert [each.captured for each in made[0]] == ([2, 2] if reads_pages else [1, 1])
    for stage in ring.stages:
        sizes = {bucket.rows for bucket in stage._graphs._graphs}
        assert sizes == ({1, 8} if reads_pages else {1})


def test_slower_graphs_are_not_used(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
) -> None:
    folder = make_model(tmp_path, "qwen2", 3)
    made = []
    plain, other, ring = run_both(
        make_ring, folder, random_tokens, [9, 4], lambda: made.append(captures(eager=1, replayed=2))
    )
    assert torch.equal(other, plain)
    assert [each.captured for each in made[0]] == [1, 1]
    assert [stage.graph_bytes for stage in ring.stages] == [0, 0]


def test_a_slower_graph_lives_as_long_as_the_others(
    make_model: MakeModel, tmp_path: Path, make_ring: type[Ring], captures: Callable[..., Any]
) -> None:
    # In torch 2.13 freeing one graph frees the cuBLAS workspaces of all others.
    made = captures()
    ring = make_ring(make_model(tmp_path, "qwen2", 3), (1,), blocks=4)
    for each in made:
        each.seconds_by_turn = [1.0, 2.0]
    for _ in range(3):
        ring.run([1, 2], [SequenceRows(0, 1, (0,)), SequenceRows(0, 1, (1,))])
    idle(ring)
    gc.collect()
    assert [each.captured for each in made] == [2, 2]
    assert [len(each.graphs) for each in made] == [2, 2]
    for stage in ring.stages:
        stage.free_kv_pool()
    gc.collect()
    assert [len(each.graphs) for each in made] == [0, 0]


def test_a_capture_that_fails_later_leaves_the_step_whole(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make_model(tmp_path, "qwen2", 3)
    made = []
    plain, other, _ = run_both(
        make_ring, folder, random_tokens, [9, 4], lambda: made.append(captures(fails_after=1))
    )
    torch.testing.assert_close(other, plain, atol=1e-4, rtol=0)
    assert [each.captured for each in made[0]] == [2, 2]
    assert "CUDA graphs disabled" in caplog.text


@pytest.mark.parametrize("right", [0, 1])
def test_graphs_that_give_other_rows_are_not_used(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    right: int,
) -> None:
    folder = make_model(tmp_path, "qwen2", 3)
    made = []
    plain, other, ring = run_both(
        make_ring, folder, random_tokens, [9, 4], lambda: made.append(captures(stale_after=right))
    )
    torch.testing.assert_close(other, plain, atol=1e-4, rtol=0)
    assert [each.captured for each in made[0]] == [1 + right] * 2
    assert [stage.graph_bytes for stage in ring.stages] == [0, 0]
    warnings = [one for one in caplog.messages if "and are disabled" in one]
    assert len(warnings) == len(ring.stages)


def test_nan_rows_do_not_disable_graphs() -> None:
    before, plain = torch.zeros(2, 3), torch.ones(2, 3)
    plain[0] = torch.nan
    assert graphs._relative_error(plain, plain, before) == 0
    assert graphs._relative_error(torch.full((2, 3), torch.nan), plain, before) != 0
    assert graphs._relative_error(plain + 0.5, plain, before) == 0.5
    assert graphs._relative_error(before, plain[:1], before[:1]) == 0


def test_graphs_are_avoided(make_model: MakeModel, tmp_path: Path) -> None:
    opened = ModelFolder.open(make_model(tmp_path, "qwen2", 2))
    for disabled_kernels, may in (((), True), (("graphs",), False)):
        stage = Stage.load_layers(opened, (0, 2), "cpu", "f32", disabled_kernels=disabled_kernels)
        stage.device = torch.device("cuda", 0)
        assert stage._may_have_graphs is may


def test_a_too_large_graph_does_not_disable_others(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
) -> None:
    folder = make_model(tmp_path, "qwen2", 3)
    made = []
    plain, other, ring = run_both(
        make_ring, folder, random_tokens, [9, 4], lambda: made.append(captures(fit=1))
    )
    torch.testing.assert_close(other, plain, atol=1e-4, rtol=0)
    assert [each.captured for each in made[0]] == [2, 2]  # nor is it captured again
    before = [each.replayed for each in made[0]]
    ring.run([1], [SequenceRows(0, 1, (199,))])
    assert [each.replayed for each in made[0]] == [count + 1 for count in before]


def test_no_request_gets_the_padding_block(
    make_model: MakeModel, tmp_path: Path, make_ring: type[Ring], captures: Callable[..., Any]
) -> None:
    from molink.errors import InvariantError

    captures()
    ring = make_ring(make_model(tmp_path, "qwen2", 3), blocks=4)
    with pytest.raises(InvariantError, match="block 4 is not in a pool of 4"):
        ring.run([1], [SequenceRows(0, 1, (4,))])


def two_rows(start: int = 0) -> list[SequenceRows]:
    return [SequenceRows(start, 1, (0,)), SequenceRows(start, 1, (1,))]


def test_no_graph_is_made_while_steps_come(
    make_model: MakeModel, tmp_path: Path, make_ring: type[Ring], captures: Callable[..., Any]
) -> None:
    made = captures()
    ring = make_ring(make_model(tmp_path, "qwen2", 3), (1,), blocks=4)
    eager = [ring.run([1, 2], two_rows()) for _ in range(20)]
    assert [each.captured for each in made] == [1, 1]  # the graph of one row, before any step
    assert [stage.capture_next_graph() for stage in ring.stages] == [True, True]
    assert [each.captured for each in made] == [2, 2]
    assert [stage.capture_next_graph() for stage in ring.stages] == [False, False]
    before = [each.replayed for each in made]
    torch.testing.assert_close(ring.run([1, 2], two_rows()), eager[-1], atol=1e-4, rtol=0)
    assert [each.replayed for each in made] == [count + 1 for count in before]


def test_an_overdue_graph_is_captured_once(
    make_model: MakeModel, tmp_path: Path, make_ring: type[Ring], captures: Callable[..., Any]
) -> None:
    made = captures()
    ring = make_ring(make_model(tmp_path, "qwen2", 1), blocks=4)
    eager = [ring.run([1, 2], two_rows()) for _ in range(MAX_RUNS_BEFORE_CAPTURE)]
    assert [each.captured for each in made] == [1]
    torch.testing.assert_close(ring.run([1, 2], two_rows()), eager[-1], atol=1e-4, rtol=0)
    assert [each.captured for each in made] == [2]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_idle_captures_touch_no_request(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    captures: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    # More rows than a block has positions; contexts beyond the window, and beyond the pool.
    monkeypatch.setattr(buckets, "_EXPECTED_SHAPES", ((24, 256), (1, 600)))
    made = captures()
    ring = make_ring(make_model(tmp_path, family, 3), (1,), blocks=4)
    ring.run(random_tokens(30), [SequenceRows(0, 30, (3, 0, 2, 1))])
    pools = [stage._pool for stage in ring.stages]
    before = [pool._storage[:, :, : pool.blocks].clone() for pool in pools]
    idle(ring)
    assert [each.captured for each in made] == [3, 3]
    assert [stage.graph_bytes for stage in ring.stages] == [3 << 20] * 2
    for pool, kept in zip(pools, before, strict=True):
        assert torch.equal(pool._storage[:, :, : pool.blocks], kept)


class Launches(TorchDispatchMode):
    """Counts operators that a device has to run or to be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        if not function.is_view and "empty" not in str(function):
            self.seen.append(function.overloadpacket.__name__)
        return function(*given, **(named or {}))


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2"])
def test_a_graph_takes_a_step_in_few_copies(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    captures: Callable[..., Any],
    family: str,
) -> None:
    captures()
    ring = make_ring(make_model(tmp_path, family, 2), blocks=8)
    for _ in range(2):
        ring.run([1, 2, 3], [SequenceRows(0, 1, (row,)) for row in range(3)])
    idle(ring)
    made = ring.stages[0]._graphs
    made._graphs = {
        bucket: replace(graph, replay=lambda: None) for bucket, graph in made._graphs.items()
    }
    sequences = tuple(SequenceRows(1, 1, (row,)) for row in range(3))
    batch = StageInput(torch.tensor([1, 2, 3]), None, sequences, (0, 1, 2))
    step = LocatedRows(batch, array("q", [1, 1, 1]), array("q", [1, 9, 17]))
    with torch.inference_mode(), Launches() as counted:
        made.replay_step(step)
        counted.seen.clear()
        made.replay_step(step)
    assert counted.seen == ["copy_"]


@pytest.mark.parametrize("wanted", [(0, 1, 2), (2,), (), (2, 0)])
@pytest.mark.parametrize("count", [3, 20])
def test_graphs_of_few_rows_find_the_likeliest_tokens(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    captures: Callable[..., Any],
    count: int,
    wanted: tuple[int, ...],
) -> None:
    captures()
    ring = make_ring(make_model(tmp_path, "qwen3", 2), blocks=32)
    sequences = tuple(SequenceRows(0, 1, (row,)) for row in range(count))
    tokens = torch.arange(count) + 20
    eager = [ring.run(tokens, sequences, wanted) for _ in range(2)][1]
    idle(ring)
    output = ring.stages[0].compute_step(StageInput(tokens, None, sequences, wanted))
    torch.testing.assert_close(output.rows, eager, atol=1e-4, rtol=0)
    rows = [SampleRow(SamplingParams(temperature=0.0), 1)] * len(wanted)
    expected = sample_tokens(eager, rows)
    with Launches() as counted:
        assert sample_tokens(output.rows, rows, output.greedy) == expected
    assert (output.greedy is None) == (count > 16)
    assert counted.seen == [] or count > 16


def test_graphs_keep_the_rows_from_which_tokens_are_predicted(
    make_model: MakeModel, tmp_path: Path, captures: Callable[..., Any]
) -> None:
    folder = make_model(tmp_path, "mimo", 4)
    found = []
    for with_graphs in (False, True):
        made = captures() if with_graphs else []
        (stage,) = Ring(folder).stages
        for position in range(STEPS):
            rows = (SequenceRows(position, 1, (3, 1, 2)),)
            output = stage.compute_step(StageInput(torch.tensor([7 + position]), None, rows, (0,)))
            assert output.normed is not None
            kept = output.normed.clone()
            predicted = stage.predict_tokens(MtpInput(kept, [8 + position], rows, (0,)))
            while stage.capture_next_graph():
                pass
        assert not with_graphs or made[0].replayed > 0
        found.append((kept, output.rows.clone(), predicted.logits))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("backend", ["triton", "gather"])
def test_begun_blocks_are_zeroed_only_where_attention_reads_them(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    from molink.stage.attention.triton_attention import TritonAttention

    kind = TritonAttention if backend == "triton" else GatherAttention
    folder = make_model(tmp_path, "qwen3", 1)
    sequences = [SequenceRows(0, 1, (row,)) for row in range(3)]
    expected = make_ring(folder, blocks=8).run([1, 2, 3], sequences)
    monkeypatch.setattr(stages, "create_attention", lambda _, shape, *given: kind(shape))
    ring = make_ring(folder, blocks=8)
    with torch.inference_mode():
        ring.stages[0]._pool._storage.fill_(torch.nan)
    zeroed = list[Sequence[int]]()
    zero_blocks = KVPool.zero_blocks

    def note(pool: KVPool, blocks: Sequence[int]) -> None:
        zeroed.append(blocks)
        zero_blocks(pool, blocks)

    monkeypatch.setattr(KVPool, "zero_blocks", note)
    torch.testing.assert_close(ring.run([1, 2, 3], sequences), expected, atol=1e-4, rtol=0)
    assert zeroed == ([] if backend == "triton" else [[0, 1, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [8, 256])
def test_cuda_graphs_give_what_eager_steps_give(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    mix: str,
    block_size: int,
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    from molink.stage.graphs.capture import CudaGraphCapturer

    stored = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[dtype]
    folder = make_model(tmp_path, "qwen3", 3, head_dim=64, dtype=stored)
    monkeypatch.setattr(Stage, "_may_have_graphs", False)

    class Always(CudaGraphCapturer):
        """Accepts a graph regardless of its time, since it is compared for correctness."""

        turn = 0

        def time_work(self, work: Callable[..., Any]) -> float:
            super().time_work(work)
            self.turn += 1
            return 1.0 if self.turn % 2 else 0.5

    def prepare() -> None:
        monkeypatch.setattr(Stage, "_may_have_graphs", True)
        monkeypatch.setattr(stages, "CudaGraphCapturer", Always)
        # Torch reserves 2 or 20 MiB at a time, more than the limit for so few layers.
        monkeypatch.setattr(stages, "GRAPH_BYTES", 1 << 30)

    given = make_ring, folder, random_tokens, MIXES[mix]
    options = {"device": "cuda:0", "block_size": block_size}
    exact, *_ = run_both(*given, lambda: None, dtype="f32", **options)
    plain, replayed, ring = run_both(*given, prepare, dtype=dtype, **options)
    for stage in ring.stages:
        # The graph of one row is captured first.
        sizes = {1, row_bucket(len(MIXES[mix]))}
        if mix == "five" and stage.reads_pages(block_size):
            sizes.add(4)  # captured as for drafts: chunks of 3 and 4 rows occurred
        assert {bucket.rows for bucket in stage._graphs._graphs} == sizes
    check_rounding(replayed, plain, exact)
