"""Settings of a PC, their sources, and how to unset them."""

import json
from pathlib import Path

import platformdirs
import pytest

from molink.errors import PortInUse
from molinkd.cli.main import run
from molinkd.peer.home import Home
from molinkd.peer.launch import Launch
from molinkd.peer.settings import SETTING_NAMES, read_options, write_options


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(platformdirs, "user_config_path", lambda *_: tmp_path / "common")
    return Home(tmp_path / "home").create_folders()


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_sources_of_settings(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config"]) == 0
    assert shown(capsys)[0] == "All settings have their default values."
    home.config.write_text(
        'name = "file"\npipeline_wait_timeout = 5\napi_keys = {phone = "secret"}', encoding="utf-8"
    )
    write_options(home.options, {"name": "last", "api_key": "secret", "pause_times": ["7:00-8:00"]})
    monkeypatch.setenv("MOLINK_VRAM_BUDGET", "6GB")
    assert run(["config"]) == 0
    lines = shown(capsys)
    assert lines[:7] == [
        "setting value from",
        "api_key … the options of the last start",
        f"api_keys … {home.config}",
        "memory 6GB the environment (MOLINK_*)",
        "name last the options of the last start",
        "pause_times 7:00-8:00 the options of the last start",
        f"pipeline_wait_timeout 5 {home.config}",
    ]
    assert run(["config", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert set(settings) == set(SETTING_NAMES)
    assert settings["worker_ports"] == {"value": "5468-5479", "from": "default"}
    assert "secret" not in json.dumps(settings)


def test_unset(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.config.write_text("pipeline_wait_timeout = 5", encoding="utf-8")
    write_options(home.options, {"stage": "none", "api_port": 1, "new": [1]})
    for wrong, why in (
        (["pipeline_wait_timeout"], f"it is set by {home.config}"),
        (["threads"], "its default is 0"),
        (["nonsense"], "unknown setting `nonsense`"),
        ([], "--all"),
        (["stage", "--all"], "--all"),
    ):
        assert run(["config", "unset", *wrong]) == 2
        assert why in capsys.readouterr().err
    assert len(read_options(home.options)) == 3
    assert run(["config", "unset", "api-port", "new"]) == 0
    assert read_options(home.options) == {"stage": "none"}
    assert run(["config", "unset", "--all"]) == 0
    assert read_options(home.options) == {}


@pytest.mark.parametrize(
    ("options", "arguments", "name"),
    [
        ({"threads": -1}, [], "threads"),
        ({"old_one": "x"}, [], "old_one"),
        ({"device": "gpu"}, [], "device"),
        ({"stage": "1-4"}, ["--device", "cuda:0,cuda:1"], "stage"),
    ],
)
def test_an_invalid_saved_value_can_be_unset(
    options: dict[str, str | int],
    arguments: list[str],
    name: str,
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(
        "molinkd.cli.daemon_start.run_daemon", lambda launch, _: launches.append(launch)
    )
    write_options(home.options, options)
    assert run(["up", *arguments]) == 2
    assert f"`molink config unset {name}`" in capsys.readouterr().err
    assert run(["config"]) == (0 if arguments else 2), "it is shown all the same"
    assert f"{name} " in capsys.readouterr().out
    assert run(["config", "unset", name]) == 0
    assert run(["up", *arguments]) == 0
    assert len(launches) == 1


@pytest.mark.parametrize("arguments", [[], ["--port", "2"]])
def test_a_saved_port_in_use_can_be_unset(
    arguments: list[str],
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def taken(*_: object) -> None:
        raise PortInUse("port 1 is taken: choose another with --api-port")

    monkeypatch.setattr("molinkd.cli.daemon_start.run_daemon", taken)
    write_options(home.options, {"api_port": 1})
    assert run(["up", *arguments]) == 4
    forgets = "`molink config unset api_port` removes it" in capsys.readouterr().err
    assert forgets == (not arguments)


def test_a_given_value_overrides_an_invalid_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(
        "molinkd.cli.daemon_start.run_daemon", lambda launch, _: launches.append(launch)
    )
    write_options(home.options, {"threads": -1})
    assert run(["up", "--threads", "2"]) == 0
    assert launches[0].settings.threads == 2
