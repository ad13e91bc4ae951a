"""Profiles: times between, below and beyond the measurements, and invalid profiles."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import WireError
from molink.facts.profile import MAX_POINTS, MAX_SECONDS, Profile
from molink.wire.messages.codec import MAX_HEADER, control_codec
from molink.wire.messages.instructions import StageProfile
from molink.wire.messages.peer_reports import StageLoaded

DECODE = ((1, 0.010), (4, 0.013), (8, 0.021))
PREFILL = ((16, 0.02), (64, 0.05))
PROFILE = Profile(
    decode=DECODE, prefill=PREFILL, context=100, decode_token_s=1e-6, prefill_token_s=1e-7
)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(0, 0.0), (1, 0.010), (2, 0.011), (4, 0.013), (6, 0.017), (8, 0.021), (10, 0.025)],
)
def test_decode_times_interpolate(rows: int, seconds: float) -> None:
    assert PROFILE.decode_s(rows) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 0.0), (1, 0.02), (16, 0.02), (40, 0.035), (64, 0.05), (128, 0.09)]
)
def test_prefill_times_interpolate(rows: int, seconds: float) -> None:
    assert PROFILE.prefill_s(rows) == pytest.approx(seconds)


def test_a_longer_context_costs_more() -> None:
    assert PROFILE.decode_s(4, context=50) == PROFILE.decode_s(4)
    assert PROFILE.decode_s(4, context=1100) == pytest.approx(0.013 + 4 * 1000 * 1e-6)
    assert PROFILE.prefill_s(64, before=1000) == pytest.approx(0.05 + 64 * 1000 * 1e-7)


def test_single_point_scales_by_rows() -> None:
    profile = Profile(decode=((1, 0.5),), prefill=((16, 2.0),))
    assert profile.is_known
    assert profile.decode_s(3) == 1.5
    assert (profile.prefill_s(8), profile.prefill_s(32)) == (2.0, 4.0)


def test_empty_profile_is_unknown() -> None:
    assert not Profile().is_known
    assert not Profile(decode=DECODE).is_known
    assert Profile().decode_s(4) == Profile().prefill_s(4) == 0.0


def test_extrapolation_never_falls() -> None:
    assert Profile(decode=((1, 0.2), (2, 0.1))).decode_s(100) == pytest.approx(0.1)


POINTS = st.lists(
    st.tuples(st.integers(1, 2000), st.floats(1e-6, MAX_SECONDS)),
    max_size=MAX_POINTS,
    unique_by=lambda point: point[0],
).map(lambda points: tuple(sorted(points)))


@given(POINTS, POINTS, st.integers(1, 5000))
def test_times_lie_between_their_neighbours(
    decode: tuple[tuple[int, float], ...], prefill: tuple[tuple[int, float], ...], rows: int
) -> None:
    profile = Profile(decode=decode, prefill=prefill)
    for points, seconds in ((decode, profile.decode_s(rows)), (prefill, profile.prefill_s(rows))):
        around = [s for r, s in points if r <= rows][-1:] + [s for r, s in points if r >= rows][:1]
        assert math.isfinite(seconds)
        if around:
            beyond = bool(points) and rows > points[-1][0]
            assert seconds >= min(around) * (1 - 1e-9)
            assert beyond or seconds <= max(around) * (1 + 1e-9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(profile), type=Profile) == profile


BAD = [
    {"decode": [[1, -0.1]]},
    {"decode": [[1, 0.0]]},
    {"decode": [[1, float("nan")]]},
    {"decode": [[1, float("inf")]]},
    {"decode": [[1, 1e9]]},
    {"decode": [[0, 0.1]]},
    {"decode": [[2, 0.1], [1, 0.2]]},
    {"prefill": [[2, 0.1], [2, 0.2]]},
    {"prefill": [[1 << 20, 0.1]]},
    {"prefill": [[rows + 1, 0.1] for rows in range(MAX_POINTS + 1)]},
    {"tile": 0},
    {"tile": 1 << 20},
    {"context": -1},
    {"decode_token_s": float("nan")},
    {"prefill_token_s": -1.0},
    {"prefill_token_s": float("inf")},
    {"decode": "fast"},
]


@pytest.mark.parametrize("fields", BAD)
def test_impossible_profile_does_not_decode(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Profile)
    body = {"type": "stage-loaded", "pipeline": "p1", "epoch": 1, "stage": 0, "port": 1}
    body |= {"max_blocks": 1, "profile": fields}
    with pytest.raises(WireError, match="not a message"):
        control_codec().decode([msgspec.msgpack.encode(body)])


def test_the_longest_profile_fits_a_header() -> None:
    points = tuple((65536 - MAX_POINTS + rows, 1 / 3) for rows in range(1, MAX_POINTS + 1))
    profile = Profile(
        decode=points, prefill=points, tile=256, decode_token_s=1 / 3, prefill_token_s=1 / 3
    )
    names = {"pipeline": "p" * 256, "epoch": 2**53}
    loaded = StageLoaded(**names, stage=2**31 - 1, port=65535, max_blocks=1, profile=profile)
    for message in (loaded, StageProfile(**names, stage=15, profile=profile)):
        (header,) = control_codec().encode(message)
        assert len(header) < MAX_HEADER // 2
        assert control_codec().decode([header]) == (message, None)
