"""The command line: help, errors in one line, exit codes, and finding the daemon."""

import subprocess
import sys
from pathlib import Path

import pytest

import molink
from molink.cli import finding
from molink.cli.main import run
from molink.errors import Unavailable
from molink.peer.demo import first_peer
from molink.peer.home import Home
from molink.peer.runfile import RunFile


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path))
    monkeypatch.delenv("MOLINK_TOKEN", raising=False)
    return tmp_path


@pytest.mark.parametrize("arguments", [[], ["--help"], ["up", "--help"], ["bench", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert "Usage" in capsys.readouterr().out


def test_no_arguments_list_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    out = capsys.readouterr().out
    for verb in ("up", "join", "demo", "chat", "status", "leave", "invite", "coordinator", "bench"):
        assert f" {verb} " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"molink {molink.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["status"], 6, "no molink runs here"),
        (["chat", "hi"], 6, "no molink runs here"),
        (["invite"], 6, "no molink runs here"),
        (["invite", "--ttl", "-1"], 2, "--ttl"),
        (["leave"], 2, "in no swarm"),
        (["join"], 2, "in no swarm"),
        (["join", ""], 2, "token is empty"),
        (["join", "hello"], 3, "doesn't begin with"),
        (["join", "molink-AAAA"], 3, "not a valid join token"),
        (["up", "--stage", "4:2"], 2, "stage"),
        (["up", "--memory", "much"], 2, "size"),
        (["up", "--model", "no such model!"], 5, "no such model!"),
        (["up", "--worker-ports", "5"], 2, "worker_ports"),
    ],
)
def test_errors_are_one_clear_line(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("molink: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err


@pytest.mark.parametrize("arguments", [["nonsense"], ["up", "--bogus"], ["demo", "--peers", "0"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "Usage" in capsys.readouterr().err


def test_a_broken_model_is_named_before_anything_starts(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert run(["up", "--model", str(folder)]) == 5
    assert "config.json" in capsys.readouterr().err
    assert not (home / "coordinator").exists()


def test_a_live_daemon_comes_before_a_demo(home: Path) -> None:
    place = Home(home)
    assert finding.find_daemon(place) is None
    with pytest.raises(Unavailable):
        finding.need_daemon(home)
    demo = place.demo(2)
    demo.create()
    note = RunFile.of_this_process(1, "http://a", ("http://a", "http://b"))
    note.save(demo.run_file)
    found = finding.need_daemon(home)
    assert found.demo
    assert found.home == first_peer(demo)
    assert found.endpoints == ("http://a", "http://b")
    RunFile.of_this_process(2, "http://live").save(place.run_file)
    found = finding.need_daemon(home)
    assert not found.demo
    assert found.endpoints == ("http://live",)


def test_commands_start_without_heavy_imports() -> None:
    code = (
        "import sys; from molink.cli.main import run; run(['--help']);"
        "heavy = {'torch', 'transformers', 'aiohttp', 'zmq'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    root = str(Path(molink.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_daemon_never_imports_torch() -> None:
    code = (
        "import sys; import molink.peer.process; import molink.cli.demonstration;"
        "heavy = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    root = str(Path(molink.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
