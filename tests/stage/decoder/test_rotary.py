"""Rotation angles of rows: tables that grow, and dynamic scaling per request."""

import math

import pytest
import torch
from torch import Tensor

from molink.checkpoint.rope import RopeConfig
from molink.stage.batch import SequenceRows
from molink.stage.decoder.rotary import Rope, rope_frequencies, rotate_half

CPU = torch.device("cpu")


def make(kind: str = "default", **fields: float | tuple[float, ...]) -> Rope:
    return Rope(RopeConfig(kind=kind, **fields), 16, torch.float32, CPU)


def angles(rope: Rope, *rows: tuple[int, ...]) -> Tensor:
    """Angles of (start, count[, reach]) rows of several requests."""
    positions = torch.cat([torch.arange(row[0], row[0] + row[1]) for row in rows])
    return rope.compute_angles(
        positions, [SequenceRows(row[0], row[1], (), *row[2:]) for row in rows]
    )


def test_pairs_rotate_by_position_times_frequency() -> None:
    rows = torch.randn(3, 2, 16)
    turned = rows.clone()
    rotate_half(turned, angles(make(), (5, 3)))
    pairs = torch.complex(rows[..., :8], rows[..., 8:])
    radians = torch.arange(5, 8)[:, None, None] * rope_frequencies(RopeConfig(), 16)[0]
    expected = pairs * torch.polar(torch.ones_like(radians), radians)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1))


def test_a_grown_table_gives_the_same_angles() -> None:
    rope = make("linear", factor=2.0)
    before = angles(rope, (0, 50))
    far = angles(rope, (5000, 3))
    assert torch.equal(angles(rope, (0, 50)), before)
    assert torch.equal(far, angles(make("linear", factor=2.0), (5000, 3)))


@pytest.mark.parametrize("others", [(), ((0, 10),), ((70, 2), (0, 3))])
def test_dynamic_scaling_is_per_request(others: tuple[tuple[int, int], ...]) -> None:
    rope = make("dynamic", factor=2.0, original_context=32)
    alone = angles(rope, (40, 5))
    assert torch.equal(angles(rope, (40, 5), *others)[:5], alone)
    assert not torch.equal(angles(make(), (40, 5)), alone)
    assert torch.equal(angles(rope, (40, 5), (0, 32))[5:], angles(make(), (0, 32)))


LONG = {
    "original_context": 32,
    "factor": 8.0,
    "short_factor": (1.0,) * 8,
    "long_factor": tuple(range(1, 9)),
}


def test_longrope_goes_by_what_a_request_may_reach() -> None:
    rope = make("longrope", **LONG)
    short, long = angles(rope, (0, 32)), angles(rope, (0, 33))
    assert not torch.equal(short, long[:32])
    assert torch.equal(angles(rope, (0, 32, 33)), long[:32])
    # Requests of both lengths in one batch, with rows in any order.
    mixed = angles(rope, (0, 33), (4, 2), (8, 1, 40), (0, 32, 32))
    expected = torch.cat((long, short[4:6], long[8:9], short))
    assert torch.equal(mixed, expected)


def test_longrope_scales_attention_by_its_factor() -> None:
    scale = (1 + math.log(8) / math.log(32)) ** 0.5
    assert rope_frequencies(RopeConfig(kind="longrope", **LONG), 16)[1] == pytest.approx(scale)
    for given, expected in (({"factor": 0.5}, 1.0), ({"attention_factor": 1.25}, 1.25)):
        assert rope_frequencies(RopeConfig(kind="longrope", **LONG | given), 16)[1] == expected


def test_a_partial_rotation_leaves_the_rest_alone() -> None:
    rope, rows = make(partial_rotary_factor=0.75), torch.randn(3, 2, 16)
    turned = rows.clone()
    rotate_half(turned, angles(rope, (5, 3)))
    assert torch.equal(turned[..., 12:], rows[..., 12:])
    alone = rows[..., :12].clone()
    rotate_half(alone, angles(Rope(RopeConfig(), 12, torch.float32, CPU), (5, 3)))
    assert torch.equal(turned[..., :12], alone)
