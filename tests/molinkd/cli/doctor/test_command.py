"""The report of ``molink doctor``, its exit code, and what ``--fix`` does."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from molinkd.cli import main
from molinkd.cli.doctor import command as verb
from molinkd.cli.doctor.facts import DoctorFacts, Finding
from molinkd.peer.home import Home
from tests.molinkd.cli.doctor.situations import facts, network, place, swarm


def run(
    monkeypatch: pytest.MonkeyPatch, known: DoctorFacts, *options: str, home: Path = Path("nowhere")
) -> int:
    monkeypatch.setattr(verb, "collect_facts", lambda *_: known)
    # As it is called where it is installed, also where it isn't beside this Python.
    monkeypatch.setattr("molinkd.peer.command_line.molink_command", lambda: "molink")
    return main.run(["doctor", "--home", str(home), *options])


def test_nothing_is_amiss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, facts()) == 0
    out = capsys.readouterr().out
    assert "ok       daemon     molink does not run on this PC now" in out
    assert out.endswith("\nNo problems, no warnings.\n")
    assert "molink up" not in out


def test_problems_come_first_with_their_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = facts(place=place(free=1, models=1), network=network(deaf="\x1b[2Jno"), daemon=5)
    assert run(monkeypatch, known) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "ok       daemon     molink runs (process 5)" in out
    assert out.index("problem  disk") > out.index("warning  discovery")
    assert "\ndisk:\n    molink list\n    molink rm NAME\n" in out
    assert out.index("\ndisk:\n") < out.index("\ndiscovery:\n")
    assert out.endswith("\n1 problem, 1 warning.\n")


def test_what_the_swarm_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = facts(daemon=5, swarm=swarm(), place=place(trouble="no PC has the files"))
    assert run(monkeypatch, known) == 0
    out = capsys.readouterr().out
    assert "warning  daemon" in out
    assert "and says: no PC has the files" in out
    assert "molink logs" in out


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, facts(place=place(free=1)), "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    names = [one["check"] for one in told["checks"]]
    assert " ".join(names) == (
        "daemon torch kernels ports firewall nat discovery state disk sleep clock version"
    )
    disk = told["checks"][names.index("disk")]
    assert (disk["level"], disk["commands"], disk["fix"]) == ("problem", [], None)


def test_damaged_options_are_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    home.options.write_text("{", encoding="utf-8")
    known = facts(place=place(damaged="bad"))
    assert run(monkeypatch, known, home=tmp_path) == 1
    assert "`molink doctor --fix` mends" in capsys.readouterr().out
    assert home.options.exists()
    assert run(monkeypatch, known, "--fix", home=tmp_path) == 0
    assert "mended" in capsys.readouterr().out
    assert not home.options.exists()
    assert home.options.with_suffix(".damaged").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists instead")
def test_a_folder_that_others_can_read_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    known = facts(place=replace(place(), is_open_to_others=True))
    assert run(monkeypatch, known, "--fix", home=tmp_path) == 0
    assert tmp_path.stat().st_mode & 0o077 == 0


def test_what_can_not_be_mended_stays(tmp_path: Path) -> None:
    finding = Finding("state", "problem", "damaged", (), "set-aside-options")
    assert verb.apply_fix(finding, Home(tmp_path)) == finding
    plain = Finding("disk", "problem", "full")
    assert verb.apply_fix(plain, Home(tmp_path)) == plain
