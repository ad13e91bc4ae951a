"""Chunk sizes by profile."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.facts.profile import MAX_CHUNK_ROWS, Profile
from molink.scheduler.chunk_size import DEFAULT_ROWS, MAX_STRETCH, ChunkSize, max_chunk_rows

ROWS = (16, 32, 64, 128, 256, 512, 1024)


def profile(
    base: float, row: float, tile: int = 1, maximum: int = 1024, **fields: float
) -> Profile:
    """Passes of ``base`` seconds plus ``row`` seconds per row of full tiles."""

    def seconds(rows: int) -> float:
        return base + row * -(-rows // tile) * tile

    decode = tuple((x, seconds(x)) for x in (1, 2, 4, 8, 16, 32, 64))
    prefill = tuple((x, seconds(x)) for x in ROWS if x <= maximum)
    return Profile(decode=decode, prefill=prefill, tile=tile, **fields)


#: Reading the weights takes 20 ms, and each row 0.1 ms.
GPU = profile(0.02, 1e-4)
A100 = profile(0.02, 1e-4, tile=128)
#: A row takes nearly as long as reading the weights.
CPU = profile(0.04, 0.005)


def test_a_fixed_size_is_used() -> None:
    assert ChunkSize(77, [GPU], 1).choose_rows(decoding=8, left=4096) == 77
    assert max_chunk_rows(77) == 77


@pytest.mark.parametrize("profiles", [[], [Profile()], [Profile(decode=((1, 0.1),))]])
def test_default_size_without_profiles(profiles: list[Profile]) -> None:
    assert ChunkSize(0, profiles, 1).choose_rows(decoding=8, left=4096) == DEFAULT_ROWS
    assert max_chunk_rows(0) == MAX_CHUNK_ROWS


@pytest.mark.parametrize(
    ("profiles", "micro_batches", "decoding", "chunk"),
    [
        # 1.7 × 20.8 ms = 35.4 ms: 154 rows, rounded down to a multiple of 16, less 8 decode rows
        ([GPU], 1, 8, 144 - 8),
        # 1.7 × (20 + 12.8) ms = 55.8 ms: room for two tiles
        ([A100], 1, 8, 256 - 8),
        ([A100], 1, 30, 256 - 30),
        # the slower stage decides
        ([GPU, CPU], 2, 16, 16 - 8),
        # nothing meets the bound, so the minimum is used
        ([CPU], 1, 1, 16 - 1),
    ],
)
def test_size_beside_decodes(
    profiles: list[Profile], micro_batches: int, decoding: int, chunk: int
) -> None:
    assert ChunkSize(0, profiles, micro_batches).choose_rows(decoding, left=4096) == chunk


def test_decodes_are_spread_over_the_micro_batches() -> None:
    one = ChunkSize(0, [A100, A100], 2).choose_rows(decoding=16, left=4096)
    assert (one + 8) % 128 == 0


def test_piggybacked_chunks_do_not_exceed_standalone_ones() -> None:
    slow_decodes = Profile(decode=((1, 5.0),), prefill=GPU.prefill)
    chunks = ChunkSize(0, [slow_decodes], 1)
    maximum = chunks.choose_rows(0, left=1 << 20)
    assert maximum - 16 < chunks.choose_rows(4, left=1 << 20) <= maximum
    assert (chunks.choose_rows(4, left=16) + 4) % 16 == 0


def test_standalone_size_is_the_smallest_near_the_best() -> None:
    # The fixed 20 ms per chunk are a smaller share of more rows; a CPU's rows take 5 ms each, a
    # GPU's 0.1 ms.
    assert ChunkSize(0, [profile(0.02, 0.005)], 1).choose_rows(0, left=4096) <= 64
    assert ChunkSize(0, [GPU], 1).choose_rows(0, left=4096) >= 512


def test_noise_does_not_shrink_standalone_chunks() -> None:
    noisy = Profile(decode=((1, 0.1),), prefill=((16, 0.02), (32, 0.12)))
    assert ChunkSize(0, [noisy], 1).choose_rows(0, left=4096) == 64
    assert ChunkSize(0, [noisy], 1).choose_rows(0, left=20) == 32


def test_short_prompts_are_split_to_fill_the_ring() -> None:
    assert ChunkSize(0, [GPU], 1).choose_rows(0, left=512) == 512
    assert ChunkSize(0, [GPU] * 4, 4).choose_rows(0, left=512) <= 256


def test_costly_contexts_shrink_chunks() -> None:
    deep = profile(0.02, 1e-4, prefill_token_s=1e-7)
    chunks = ChunkSize(0, [deep], 1)
    sizes = [chunks.choose_rows(8, left=4096, before=before) for before in (0, 1024, 4096, 65536)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_slow_decodes_allow_larger_chunks() -> None:
    deep = profile(0.02, 1e-4, context=128, decode_token_s=1e-6)
    chunks = ChunkSize(0, [deep], 1)
    sizes = [chunks.choose_rows(8, left=4096, context=context) for context in (0, 128, 2048, 8192)]
    assert sizes == sorted(sizes)
    assert sizes[0] == sizes[1] < sizes[2] < sizes[3]
    assert chunks.choose_rows(0, left=4096, context=8192) == chunks.choose_rows(0, left=4096)


#: Measured with `molink bench stage`: eight layers on an AVX512-BF16 core, where a few rows cost as
#: much as many.
CORE = Profile(
    decode=((1, 0.0069), (8, 0.0089), (64, 0.062)),
    prefill=((8, 0.0081), (16, 0.0153), (64, 0.055), (128, 0.109), (512, 0.451)),
)


def test_queued_chunks_leave_alone_where_decode_rows_cost_little() -> None:
    chunks = ChunkSize(0, [CORE] * 3, 3)
    assert chunks.leaves_alone(3, queued=8192, prompts=4)
    assert not chunks.leaves_alone(3, queued=64, prompts=4), "no queue"
    assert not chunks.leaves_alone(3, queued=8192, prompts=1), "no queue"
    assert not chunks.leaves_alone(0, queued=8192, prompts=4), "nothing decodes"
    assert not ChunkSize(64, [CORE], 3).leaves_alone(3, queued=8192, prompts=4)
    assert not ChunkSize(0, [], 3).leaves_alone(3, queued=8192, prompts=4)


def test_queued_chunks_that_leave_alone_take_the_places_of_decode_rows() -> None:
    chunks = ChunkSize(0, [CORE] * 3, 3)
    rows = [chunks.choose_rows(3, 4096, 0, 128, 8192, 4, alone=alone) for alone in (True, False)]
    assert rows == [48, 47]


def test_queued_chunks_share_an_expensive_read_with_decode_rows() -> None:
    assert not ChunkSize(0, [GPU] * 3, 3).leaves_alone(8, queued=1 << 16, prompts=64)


def test_sizes_follow_new_profiles() -> None:
    chunks = ChunkSize(0, [GPU, GPU], 2)
    before = chunks.choose_rows(8, left=4096)
    chunks.set_profiles([GPU, GPU.scale_by(1.0, prefill=3.0)])
    assert chunks.choose_rows(8, left=4096) < before
    chunks.set_profiles([GPU, GPU])
    assert chunks.choose_rows(8, left=4096) == before


def test_chunks_do_not_exceed_the_measured_range() -> None:
    assert ChunkSize(0, [GPU, profile(0.02, 1e-4, maximum=256)], 2).choose_rows(0, left=4096) <= 256
    slow = Profile(decode=((1, 1.0),), prefill=((16, 2.0), (32, 2.1)))
    assert ChunkSize(0, [slow], 1).choose_rows(0, left=4096) == 128


def test_sizes_below_a_tile_must_be_faster() -> None:
    # Its tiles are real: 16 rows cost as much as 64.
    stepped = profile(1e-6, 1e-3, tile=64)
    assert ChunkSize(0, [stepped], 1).choose_rows(1, left=4096) == 64 - 1
    # Here a whole tile of 64 rows costs much more than 16 rows.
    smooth = Profile(decode=stepped.decode, prefill=((16, 0.02), (64, 0.3), (128, 0.6)), tile=64)
    assert ChunkSize(0, [smooth], 1).choose_rows(1, left=4096) == 16 - 1


TIMES = st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=7).map(sorted)


@st.composite
def any_profile(draw: st.DrawFn) -> Profile:
    decode, prefill = draw(TIMES), draw(TIMES)
    return Profile(
        decode=tuple((1 << i, seconds) for i, seconds in enumerate(decode)),
        prefill=tuple((16 << i, seconds) for i, seconds in enumerate(prefill)),
        tile=draw(st.integers(1, 256)),
        prefill_token_s=draw(st.floats(0, 1e-3)),
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(any_profile(), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 400),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 20),
)
def test_any_profile_gives_sizes_within_bounds(
    profiles: list[Profile], micro_batches: int, decoding: int, left: int, before: int
) -> None:
    chunks = ChunkSize(0, profiles, micro_batches)
    rows = chunks.choose_rows(decoding, left, before)
    assert 1 <= rows <= MAX_CHUNK_ROWS
    assert chunks.choose_rows(decoding, left, before) == rows


def test_the_bound_stays_below_twice_an_iteration() -> None:
    assert 1 < MAX_STRETCH < 2


def test_queued_prompts_use_throughput_sizes() -> None:
    # 12 ms for 8 rows, 1.4 ms for each further row, 1.5 ms of handling: 32 rows cost 5 % more.
    cpu = Profile(
        decode=((1, 0.01), (8, 0.012)),
        prefill=((8, 0.012), (16, 0.0232), (32, 0.0456), (64, 0.0904), (512, 0.7176)),
    )
    chunks = ChunkSize(0, [cpu, cpu], 2)
    assert chunks.choose_rows(2, left=400, queued=400, prompts=2) < 15
    assert chunks.choose_rows(2, left=400, queued=1200, prompts=2) < 15, "1.7 s"
    assert chunks.choose_rows(2, left=400, queued=2000, prompts=2) == 31
    assert chunks.choose_rows(2, left=4000, queued=4000, prompts=1) < 15, (
        "a single prompt is no queue"
    )
    assert chunks.choose_rows(0, left=400, queued=4000, prompts=2) == chunks.choose_rows(
        0, left=400
    )
    # The queue counts earlier if more prompts wait than streams decode.
    assert chunks.choose_rows(3, left=400, queued=400, prompts=4) == 30
    assert chunks.choose_rows(3, left=400, queued=400, prompts=3) < 15
    assert chunks.choose_rows(3, left=300, queued=300, prompts=4) < 15, "0.4 s"
    ring = ChunkSize(0, [GPU] * 4, 4)
    assert ring.choose_rows(0, left=512, queued=4000, prompts=8) == ring.choose_rows(0, left=512)
    # A fixed size never changes.
    assert ChunkSize(8, [cpu], 2).choose_rows(1, left=400, queued=4000, prompts=4) == 8


def test_a_queue_does_not_shrink_large_chunks() -> None:
    chunks = ChunkSize(0, [CPU], 1)
    assert chunks.choose_rows(1, left=400, queued=10_000, prompts=9) >= chunks.choose_rows(
        1, left=400
    )
    gpu = ChunkSize(0, [GPU], 1)
    assert gpu.choose_rows(8, left=4096, queued=1 << 20, prompts=256) <= MAX_CHUNK_ROWS
