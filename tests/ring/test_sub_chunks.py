"""Sub-chunk sizes for a GPU, a CPU and an unknown device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.ring.sub_chunks import (
    MIN_ROWS,
    EfficientSubChunks,
    WholeVolumePolicy,
    create_sub_chunk_policy,
)

TILE = 64
#: Reading the weights takes 20 ms; from 64 rows on each row costs 0.1 ms, in full tiles.
GPU = Profile(
    decode=((1, 0.02),),
    prefill=tuple((x, 0.018 + 1e-4 * -(-x // TILE) * TILE) for x in (16, 64, 128, 256, 512)),
    tile=TILE,
)
#: From a few rows on, each row costs the same.
CPU = Profile(decode=((1, 0.01),), prefill=tuple((x, 0.02 + 0.005 * x) for x in (16, 64, 256)))
PROFILES = st.sampled_from([GPU, CPU, Profile(prefill=((4, 1.0),)), Profile(prefill=((512, 1.0),))])


def test_efficient_sizes_follow_the_profile() -> None:
    gpu, cpu = EfficientSubChunks(GPU), EfficientSubChunks(CPU)
    assert (gpu.min_rows, gpu.efficient_rows) == (128, 320)
    assert (cpu.min_rows, cpu.efficient_rows) == (16, 64)


def test_slow_rows_are_collected_until_a_pass_pays() -> None:
    sub_chunks = EfficientSubChunks(GPU)
    assert [
        sub_chunks.next_rows(here, 512 - here, 0, 0.0) for here in (16, 127, 128, 200, 256)
    ] == [
        0,
        0,
        128,
        192,
        256,
    ]


def test_remainders_are_worth_a_pass() -> None:
    sub_chunks = EfficientSubChunks(GPU)
    assert sub_chunks.next_rows(128, 128, 0, 0.0) == 128
    assert sub_chunks.next_rows(128, 127, 0, 0.0) == 0
    assert sub_chunks.next_rows(192, 64, 0, 0.0) == 128
    assert sub_chunks.next_rows(255, 0, 0, 0.0) == 255
    assert sub_chunks.next_rows(1, 0, 0, 0.0) == 1


def test_a_busy_stage_runs_efficient_sub_chunks() -> None:
    sub_chunks = EfficientSubChunks(CPU)
    assert sub_chunks.next_rows(16, 112, 0, 900.0) == 16
    sub_chunks.busy_share = 0.6
    assert [sub_chunks.next_rows(here, 128 - here, 0, 900.0) for here in (16, 63, 64)] == [0, 0, 64]
    assert sub_chunks.next_rows(47, 1, 0, 900.0) == 0, "neither part would be worth a pass"
    assert sub_chunks.next_rows(48, 0, 0, 900.0) == 48
    assert sub_chunks.next_rows(16, 112, 1, 900.0) == 16, "the decode row reads the weights anyway"


def test_piggybacked_sub_chunks_fill_a_tile() -> None:
    sub_chunks = EfficientSubChunks(GPU)
    assert sub_chunks.next_rows(70, 400, 8, 0.0) == 56
    assert sub_chunks.next_rows(130, 400, 8, 0.0) == 120
    # 14 rows would fill a tile: too few for a message.
    assert sub_chunks.next_rows(60, 400, 50, 0.0) == 0
    assert sub_chunks.next_rows(130, 400, 50, 0.0) == 78


def test_complete_prompt_is_split_into_sub_chunks() -> None:
    sub_chunks, left, sizes = EfficientSubChunks(GPU), 2048, []
    while left:
        sizes.append(sub_chunks.next_rows(left, 0, 8, 0.0))
        left -= sizes[-1]
    assert sizes == [376, 376, 376, 504, 416]
    assert sub_chunks.next_rows(512, 0, 8, 0.0) == 512, "what the head makes is left as it is"


def test_slow_arrival_allows_small_sub_chunks() -> None:
    sub_chunks = EfficientSubChunks(GPU)
    assert [sub_chunks.next_rows(here, 400, 0, 200.0) for here in (15, 16, 17, 70)] == [
        0,
        16,
        17,
        64,
    ]
    # A pass of up to a tile takes 24 ms; in twice that time 44 rows arrive.
    assert [sub_chunks.next_rows(here, 400, 0, 900.0) for here in (47, 48)] == [0, 48]
    assert sub_chunks.next_rows(17, 15, 0, 200.0) == 16
    assert sub_chunks.next_rows(17, 14, 0, 200.0) == 0
    assert sub_chunks.next_rows(20, 400, 50, 200.0) == 20
    assert sub_chunks.next_rows(127, 400, 0, 10_000.0) == 0


@given(
    PROFILES,
    st.integers(1, 4096),
    st.integers(0, 4096),
    st.integers(0, 128),
    st.sampled_from([0.0, 10.0, 1000.0, 1e9]),
)
def test_every_volume_runs_to_its_end(
    profile: Profile, here: int, coming: int, piggybacked: int, slowdown: float
) -> None:
    sub_chunks = EfficientSubChunks(profile)
    rows = sub_chunks.next_rows(here, coming, piggybacked, slowdown)
    assert 0 <= rows <= here
    assert rows or coming
    if coming and rows:
        assert rows >= min(MIN_ROWS, sub_chunks.min_rows)
        assert here + coming - rows >= (sub_chunks.min_rows if not slowdown else MIN_ROWS)
    assert rows < 2 * sub_chunks.efficient_rows + profile.tile
    last_stage = EfficientSubChunks(profile, forwards=False)
    assert last_stage.next_rows(here, 0, piggybacked, 0.0) == here
    assert last_stage.next_rows(here, coming, piggybacked, slowdown) >= rows or not coming


@pytest.mark.parametrize(
    ("profile", "cut_through", "kind"),
    [
        (GPU, True, EfficientSubChunks),
        (GPU, False, WholeVolumePolicy),
        (UNKNOWN_PROFILE, True, WholeVolumePolicy),
    ],
)
def test_unknown_profile_stores_and_forwards(
    profile: Profile, cut_through: bool, kind: type
) -> None:
    policy = create_sub_chunk_policy(profile, cut_through=cut_through, forwards=True)
    assert isinstance(policy, kind)
    assert policy.next_rows(100, 0, 0, 0.0) == 100


def test_whole_volumes_wait_for_all_rows() -> None:
    assert [WholeVolumePolicy().next_rows(4000, coming, 0, 0.0) for coming in (1, 0)] == [0, 4000]
