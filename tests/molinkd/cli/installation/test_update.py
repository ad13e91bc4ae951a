"""``molink update``: the order of its steps, and what a failure leaves. pip is not run."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import molink
from molink.errors import MolinkError, Unavailable
from molink.wire.protocol import PROTOCOL
from molinkd.cli.installation import update
from molinkd.cli.installation.kinds import Installation
from molinkd.cli.main import run
from molinkd.peer.home import Home
from tests.support.release_server import ReleaseServer

NEW = "99.0.0"


class Rig:
    """A PC with a running daemon; ``steps`` records what the command does to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
        self.steps: list[str] = []
        self.locks: list[str] = []
        self.failure: MolinkError | None = None
        self.drain_failure: MolinkError | None = None
        self.others = [{"daemon_pid": 8, "state": "online"}]
        self.found = [SimpleNamespace(home=home, run_file=SimpleNamespace(pid=7), is_demo=False)]
        self.environment = Installation("release", home.root)
        client = update.daemon_client
        service = SimpleNamespace(get_status=lambda: SimpleNamespace(installed=False))
        monkeypatch.setattr(update, "find_installation", lambda: self.environment)
        monkeypatch.setattr(update, "install_packages", self.install)
        monkeypatch.setattr(update, "torch_version", lambda: "2.13.0+cpu")
        monkeypatch.setattr(update, "run_molink", lambda words, _: self.note(" ".join(words)))
        monkeypatch.setattr(update, "stop_daemon", lambda *_: self.note("stop"))
        monkeypatch.setattr(update, "drain", self.drain)
        monkeypatch.setattr(update, "system_service", lambda: service)
        monkeypatch.setattr(client, "find_daemons", lambda _: iter(self.found))
        monkeypatch.setattr(client, "fetch_status", lambda _: {"peers": self.peers()})
        monkeypatch.setattr(client, "set_drain", lambda *_, on: self.note(f"drain {on}"))

    def note(self, step: str) -> None:
        self.steps.append(step.replace(str(self.environment.folder), "HOME"))

    def peers(self) -> list[dict[str, Any]]:
        return [{"daemon_pid": 7, "state": "online"}, *self.others]

    def drain(self, **_: object) -> None:
        self.note("drain")
        if self.drain_failure is not None:
            raise self.drain_failure

    def install(self, arguments: Sequence[str], what: str) -> None:
        self.note(what)
        paths = [Path(word) for word in arguments if word.endswith(".txt")]
        self.locks = [path.read_text(encoding="utf-8") for path in paths]
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path))
    return Rig(monkeypatch, Home(tmp_path))


RESTART = ["join --background --home HOME"]


def test_it_moves_layers_installs_and_starts_again(rig: Rig, server: ReleaseServer) -> None:
    server.publish(NEW, {"requirements.txt": b"missing==1.0 \\\n    --hash=sha256:aa\n"})
    assert run(["update", "--from", server.url]) == 0
    assert rig.steps == ["drain", "stop", f"molink {NEW}", "setup --cpu", *RESTART]
    lock, own = rig.locks
    assert lock.startswith("missing==1.0")
    assert own.startswith("molink @ file://")
    assert "--hash=sha256:" in own


@pytest.mark.parametrize("fault", ["cut", "altered", "short list"])
def test_a_bad_download_does_not_stop_what_runs(
    fault: str, rig: Rig, server: ReleaseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = server.publish(NEW, {})
    if fault == "cut":
        server.cut.add(wheel)
    elif fault == "altered":
        server.files["requirements.txt"] = b"evil==1.0"
    else:
        server.files["SHA256SUMS"] = server.files["SHA256SUMS"][:80]
    assert run(["update", "--from", server.url]) == 1
    assert rig.steps == []
    assert capsys.readouterr().err.startswith("error: ")


def test_the_old_version_starts_again_if_the_new_one_is_not_installed(
    rig: Rig, server: ReleaseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.publish(NEW, {})
    rig.failure = MolinkError("no network")
    assert run(["update", "--from", server.url]) == 1
    assert rig.steps == ["drain", "stop", f"molink {NEW}", *RESTART]
    assert "no network" in capsys.readouterr().err


def test_a_check_changes_nothing(
    rig: Rig, server: ReleaseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.publish(NEW, {}, protocol=PROTOCOL + 1)
    assert run(["update", "--check", "--from", server.url]) == 0
    said = capsys.readouterr().out
    assert f"molink {NEW} is available" in said
    assert f"protocol {PROTOCOL + 1}, this one {PROTOCOL}" in said
    server.publish(molink.__version__, {})
    assert run(["update", "--from", server.url]) == 0
    assert "is the newest release" in capsys.readouterr().out
    assert rig.steps == []
    assert not any(name.endswith(".whl") for name in server.asked)


def test_homebrew_updates_what_it_manages(
    rig: Rig, server: ReleaseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.publish(NEW, {})
    rig.environment = Installation("brew", rig.environment.folder)
    assert run(["update", "--from", server.url]) == 2
    assert "brew upgrade molink" in capsys.readouterr().err
    assert rig.steps == []


def test_a_clone_and_a_demo_are_refused(
    rig: Rig, server: ReleaseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.publish(NEW, {})
    rig.found[0].is_demo = True
    assert run(["update", "--from", server.url]) == 2
    assert "a demo runs here" in capsys.readouterr().err
    rig.environment = Installation("clone", rig.environment.folder)
    assert run(["update", "--from", server.url]) == 2
    assert "by `git pull` and" in capsys.readouterr().err
    assert rig.steps == []


def test_a_single_or_stopped_pc_does_not_drain(rig: Rig, server: ReleaseServer) -> None:
    server.publish(NEW, {})
    rig.others = [{"daemon_pid": 8, "state": "offline"}]
    assert run(["update", "--from", server.url]) == 0
    assert rig.steps == ["stop", f"molink {NEW}", "setup --cpu", *RESTART]
    rig.steps, rig.found = [], []
    assert run(["update", "--from", server.url]) == 0
    assert rig.steps == [f"molink {NEW}", "setup --cpu"]


def test_the_user_may_keep_layers_in_place(
    rig: Rig, server: ReleaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(NEW, {})
    rig.drain_failure = Unavailable("nobody has room")
    monkeypatch.setattr("molinkd.cli.confirmation.is_terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda _: False)
    assert run(["update", "--from", server.url]) == 1
    assert rig.steps == ["drain", "drain False"]
    rig.steps = []
    assert run(["update", "--yes", "--from", server.url]) == 0
    assert rig.steps[:3] == ["drain", "stop", f"molink {NEW}"]


def test_what_is_installed_is_not_asked_for_again() -> None:
    installed = f"pytest=={pytest.__version__} \\\n    --hash=sha256:aa"
    missing = "missing==1.0 ; x == 'y' \\\n    --hash=sha256:bb\n"
    assert update.drop_installed(f"# Made by\n{installed}\n{missing}") == f"# Made by\n{missing}"
