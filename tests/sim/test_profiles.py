"""Profiles: bundled ones are plausible, and errors name file and key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molink.errors import UsageError
from molink.sim.profiles import LinkProfile, list_profiles, load_device, load_link, load_model
from molink.sim.roofline import StepRows, split_layers, stage_rooflines

GOOD = """
source = "a test"
memory_gbs = 1000
tflops = 100.0
memory_gb = 24
memory_efficiency = 0.9
compute_efficiency = 0.6
step_ms = 0
tile = 64
"""


def test_bundled_profiles_load() -> None:
    assert {"rtx4090", "rtx3090", "rtx3060"} <= set(list_profiles("devices"))
    assert {"qwen-7b", "llama-3-8b"} <= set(list_profiles("models"))
    assert "wan-100mbps-30ms" in list_profiles("links")
    for device in map(load_device, list_profiles("devices")):
        for model in map(load_model, list_profiles("models")):
            stages = stage_rooflines([device] * 3, model, split_layers(model.layers, 3))
            assert all(stage.make_profile().is_known for stage in stages)
    for link in map(load_link, list_profiles("links")):
        assert link.rate > 0
        assert link.source


def test_a_profile_file_loads(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD, encoding="utf-8")
    device = load_device(str(file))
    assert (device.name, device.memory_gbs, device.tile) == ("mine", 1000, 64)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("memory_gbs = 1000", "memory_gbs = 0", "memory_gbs must be above 0, not 0"),
        ("memory_gbs = 1000", "memory_gbs = -5", "memory_gbs must be above 0, not -5"),
        ("memory_gbs = 1000", "memory_gbs = nan", "memory_gbs must be above 0, not nan"),
        ("memory_gbs = 1000", "memory_gbs = inf", "must be above 0 and at most 1e+09, not inf"),
        ("memory_gbs = 1000", 'memory_gbs = "fast"', "memory_gbs can't be 'fast'"),
        ("memory_gbs = 1000", "", "missing keys: memory_gbs"),
        ("tile = 64", "tile = 6.5", "tile can't be 6.5"),
        ("tile = 64", "tile = true", "tile can't be True"),
        ("tile = 64", "tiles = 64", "unknown key 'tiles'"),
        ("tile = 64", 'name = "x"', "unknown key 'name'"),
        ("step_ms = 0", "step_ms = -1", "step_ms must be 0 or more, not -1"),
        (
            "memory_efficiency = 0.9",
            "memory_efficiency = 1.1",
            "memory_efficiency must be above 0 and at most 1, not 1.1",
        ),
        ("tile = 64", "tile = ", "Invalid value"),
    ],
)
def test_invalid_values_are_rejected(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_device(str(file))
    assert "mine.toml" in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("load", [load_device, load_model, load_link])
def test_an_unknown_name_is_rejected(load: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no profile 'foo' among the \w+: \w+"):
        load("foo")
    with pytest.raises(UsageError, match=r"can't read the profile .*foo\.toml"):
        load(str(tmp_path / "foo.toml"))


def test_a_link_needs_bandwidth() -> None:
    with pytest.raises(UsageError, match="bandwidth_mbps must be above 0, not 0"):
        LinkProfile(0, 30)
    with pytest.raises(UsageError, match="latency_ms must be 0 or more"):
        LinkProfile(100, -1)
    assert LinkProfile(100, 0).latency == 0


def test_the_ring_of_the_paper() -> None:
    """Three RTX 4090 with Qwen-7B: about 16 ms per token for the steps."""
    model = load_model("qwen-7b")
    stages = stage_rooflines([load_device("rtx4090")] * 3, model, split_layers(model.layers, 3))
    total = sum(stage.make_profile().decode_s(1) for stage in stages)
    assert 0.015 < total < 0.018
    for stage in stages:
        profile = stage.make_profile()
        # Rows cost little until computing takes longer than reading the weights.
        assert profile.decode_s(8) < 1.1 * profile.decode_s(1)
        assert profile.prefill_s(2048) > 10 * profile.prefill_s(16)


def test_a_profile_agrees_with_its_roofline() -> None:
    model = load_model("llama-3-8b")
    (stage,) = stage_rooflines([load_device("rtx3090")], model, [model.layers])
    profile = stage.make_profile()
    for rows in (1, 8, 64):
        step = StepRows(decode=rows, decode_context=rows * 1000, sampled=rows)
        assert profile.decode_s(rows, 1000) == pytest.approx(stage.step_s(step))
    step = StepRows(prefill=256, prefill_context=256 * 1024 + 256 * 257 // 2, sampled=1)
    assert profile.prefill_s(256, 1024) == pytest.approx(stage.step_s(step))


def test_layers_are_split_evenly() -> None:
    assert split_layers(32, 3) == [11, 11, 10]
    assert split_layers(4, 4) == [1, 1, 1, 1]
