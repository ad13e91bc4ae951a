"""The options of the last start."""

import os
import sys
from pathlib import Path

import pytest

from molink.errors import UsageError
from molinkd.peer.home import Home
from molinkd.peer.settings import format_options, load_settings, read_options, write_options


def test_they_are_stored_privately(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    assert read_options(path) == {}
    options = {"stage": "none", "threads": 2, "api_key": "k"}
    write_options(path, options)
    assert read_options(path) == options
    assert format_options(options) == "--stage none --threads 2 --api-key …"
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o077 == 0


def test_pause_times_are_saved(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    write_options(path, {"pause_times": "18:00-23:30, 7:00-8:00", "pause_when_busy": "on"})
    settings = load_settings(Home(tmp_path), {}, {}, read_options(path))
    assert settings.pause_times == ("18:00-23:30", "7:00-8:00")
    assert settings.pause_when_busy == "on"


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {}}'])
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="can't be read"):
        read_options(path)


def test_precedence(tmp_path: Path) -> None:
    home = Home(tmp_path).create_folders()
    home.config.write_text(
        'name = "file"\nstage = "1"\npipeline_wait_timeout = 5', encoding="utf-8"
    )
    remembered = {"name": "last", "stage": "none", "threads": 3}
    environment = {**os.environ, "MOLINK_STAGE": "auto"}
    settings = load_settings(home, {"threads": 4}, environment, remembered)
    assert (settings.name, settings.stage, settings.threads, settings.pipeline_wait_timeout) == (
        "last",
        "auto",
        4,
        5,
    )
    with pytest.raises(UsageError, match="the options of the last start"):
        load_settings(home, {}, {}, {"threads": -1})
