"""The report of ``molink doctor``, its exit code, and ``--fix``."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from molinkd.cli import main
from molinkd.cli.doctor import command
from molinkd.cli.doctor.facts import DoctorFacts, Finding
from molinkd.peer.home import Home
from tests.molinkd.cli.doctor.situations import facts, host, network, swarm


def run(
    monkeypatch: pytest.MonkeyPatch, known: DoctorFacts, *options: str, home: Path = Path("nowhere")
) -> int:
    monkeypatch.setattr(command, "collect_facts", lambda *_: known)
    # Command names as installed, even if they are not beside this Python.
    monkeypatch.setattr("molinkd.peer.command_line.molink_command", lambda: "molink")
    return main.run(["doctor", "--home", str(home), *options])


def test_a_healthy_pc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, facts()) == 0
    out = capsys.readouterr().out
    assert "ok       daemon     molink is not running on this PC" in out
    assert out.endswith("\nNo problems, no warnings.\n")
    assert "molink up" not in out


def test_problems_are_listed_first_with_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = facts(
        host=host(free_bytes=1, model_bytes=1),
        network=network(multicast_error="\x1b[2Jno"),
        daemon_pid=5,
    )
    assert run(monkeypatch, known) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "ok       daemon     molink runs (process 5)" in out
    assert out.index("problem  disk") > out.index("warning  discovery")
    assert "\ndisk:\n    molink list\n    molink rm NAME\n" in out
    assert out.index("\ndisk:\n") < out.index("\ndiscovery:\n")
    assert out.endswith("\n1 problem, 1 warning.\n")


def test_the_swarms_own_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = facts(daemon_pid=5, swarm=swarm(), host=host(trouble="no PC has the files"))
    assert run(monkeypatch, known) == 0
    out = capsys.readouterr().out
    assert "warning  daemon" in out
    assert "and reports: no PC has the files" in out
    assert "molink logs" in out


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, facts(host=host(free_bytes=1)), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    names = [one["check"] for one in report["checks"]]
    assert " ".join(names) == (
        "daemon torch kernels ports firewall nat discovery state disk sleep clock version"
    )
    disk = report["checks"][names.index("disk")]
    assert (disk["level"], disk["commands"], disk["fix"]) == ("problem", [], None)


def test_corrupt_options_are_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    home.options.write_text("{", encoding="utf-8")
    known = facts(host=host(options_error="bad"))
    assert run(monkeypatch, known, home=tmp_path) == 1
    assert "`molink doctor --fix` repairs" in capsys.readouterr().out
    assert home.options.exists()
    assert run(monkeypatch, known, "--fix", home=tmp_path) == 0
    assert "fixed" in capsys.readouterr().out
    assert not home.options.exists()
    assert home.options.with_suffix(".damaged").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists instead")
def test_a_folder_that_others_can_read_is_restricted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    known = facts(host=replace(host(), is_open_to_others=True))
    assert run(monkeypatch, known, "--fix", home=tmp_path) == 0
    assert tmp_path.stat().st_mode & 0o077 == 0


def test_unfixable_findings_stay(tmp_path: Path) -> None:
    finding = Finding("state", "problem", "damaged", (), "set-aside-options")
    assert command.apply_fix(finding, Home(tmp_path)) == finding
    plain = Finding("disk", "problem", "full")
    assert command.apply_fix(plain, Home(tmp_path)) == plain
