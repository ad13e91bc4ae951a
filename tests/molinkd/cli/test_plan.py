"""``molink plan``: its JSON, its table, and clear errors."""

import json

import pytest

from molinkd.cli.main import run

RING = ("plan", "--stages", "2", "--prompt-tokens", "64", "--output-tokens", "4")


def test_a_plan_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*RING, "--streams", "4", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["layers"] == [[0, 16], [16, 32]]
    assert [each["count"] for each in planned["curve"]] == [2, 3, 4]
    assert 0 < planned["floor_s"] <= planned["token_s"]


def test_a_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*RING, "--bandwidth", "20", "--latency", "5"]) == 0
    shown = capsys.readouterr().out
    assert "qwen-7b on 2 x rtx4090, links of 20 Mbps and 5 ms one way" in shown
    assert "layers 0:16, layers 16:32" in shown
    assert "<" in shown


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--device", "rtx9090", "rtx4090"),
        ("--bandwidth", "-3", "bandwidth_mbps"),
        ("--latency", "nan", "latency_ms"),
        ("--streams", "0", "--streams"),
        ("--model-profile", "nothing", "qwen-7b"),
    ],
)
def test_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str, told: str
) -> None:
    assert run([*RING, option, value]) == 2
    assert told in capsys.readouterr().err


def test_the_help_names_what_is_imported_late(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "simulate" in shown
    assert "plan" in shown
