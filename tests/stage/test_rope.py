"""Angles of rows: tables that grow, and dynamic scaling per request."""

import pytest
import torch

from molink.model.rope import RopeConfig
from molink.stage.rope import Rope, frequencies, rotate

CPU = torch.device("cpu")


def make(kind="default", **fields):
    return Rope(RopeConfig(kind=kind, **fields), 16, torch.float32, CPU)


def angles(rope, *rows):
    """Angles of (start, count) rows of several requests."""
    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    return rope.angles(positions, [sum(row) for row in rows], [count for _, count in rows])


def test_rotation_turns_pairs_by_position_times_frequency():
    rows = torch.randn(3, 2, 16)
    turned = rows.clone()
    rotate(turned, angles(make(), (5, 3)))
    pairs = torch.complex(rows[..., :8], rows[..., 8:])
    radians = torch.arange(5, 8)[:, None, None] * frequencies(RopeConfig(), 16)[0]
    expected = pairs * torch.polar(torch.ones_like(radians), radians)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1))


def test_a_grown_table_gives_the_same_angles():
    rope = make("linear", factor=2.0)
    before = angles(rope, (0, 50))
    far = angles(rope, (5000, 3))
    assert torch.equal(angles(rope, (0, 50)), before)
    assert torch.equal(far, angles(make("linear", factor=2.0), (5000, 3)))


@pytest.mark.parametrize("others", [(), ((0, 10),), ((70, 2), (0, 3))])
def test_dynamic_scaling_is_a_requests_own_affair(others):
    rope = make("dynamic", factor=2.0, original_context=32)
    alone = angles(rope, (40, 5))
    assert torch.equal(angles(rope, (40, 5), *others)[:5], alone)
    assert not torch.equal(angles(make(), (40, 5)), alone)
    assert torch.equal(angles(rope, (40, 5), (0, 32))[5:], angles(make(), (0, 32)))
