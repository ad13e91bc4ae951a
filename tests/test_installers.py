"""What ``install.sh`` and ``install.ps1`` say and choose; neither is run here."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tree_sitter
import tree_sitter_powershell

ROOT = Path(__file__).resolve().parent.parent
SHELL = (ROOT / "install.sh").read_text(encoding="utf-8")
POWER = (ROOT / "install.ps1").read_text(encoding="utf-8")
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_powershell.language()))
#: Commands of Windows PowerShell 5.1 that the script may use.
BUILT_IN = {
    "Copy-Item",
    "ForEach-Object",
    "Get-Content",
    "Get-FileHash",
    "Get-Item",
    "Join-Path",
    "New-Item",
    "New-Object",
    "Out-Null",
    "Read-Host",
    "Remove-Item",
    "Select-Object",
    "Select-String",
    "Set-Content",
    "Set-ItemProperty",
    "Set-Location",
    "Test-Path",
    "Where-Object",
    "Write-Host",
}
#: Variables that PowerShell sets itself.
AUTOMATIC = {"_", "args", "false", "matches", "null", "true", "lastexitcode", "psscriptroot"} | {
    "psversiontable",
    "localappdata",
}


def nodes(node: tree_sitter.Node, kind: str) -> list[tree_sitter.Node]:
    """All of that kind, in the order of the text."""
    found = [node] if node.type == kind else []
    for child in node.children:
        found += nodes(child, kind)
    return found


def texts(kind: str, source: str = POWER) -> set[str]:
    root = PARSER.parse(source.encode()).root_node
    return {(node.text or b"").decode() for node in nodes(root, kind)}


def test_the_powershell_script_parses() -> None:
    assert not PARSER.parse(POWER.encode()).root_node.has_error
    assert PARSER.parse(b"function A { if ($x { 1 } }").root_node.has_error


def test_the_powershell_script_calls_what_there_is() -> None:
    known = texts("function_name") | BUILT_IN
    called = {name for name in texts("command_name") if re.fullmatch(r"[A-Z][\w-]+", name)}
    assert called <= known
    assert texts("function_name") - {"Say", "Die"} <= called


def test_a_folder_whose_path_is_too_long_is_refused_before_torch_comes() -> None:
    (root,) = re.findall(r"^\$LongestRoot = (\d+)$", POWER, re.M)
    longest = max(len(str(path)) for path in importlib.metadata.files("torch") or ())
    assert longest > 100
    assert len("\\".join(["R" * int(root), ".venv", "Lib", "site-packages", "x" * longest])) < 260
    assert POWER.index("\nTest-PathLength\n") < POWER.index("\n    Install-Molink ")


def unset(source: str) -> set[str]:
    """Variables that are set in no assignment, parameter list or loop: misspelt ones."""
    root = PARSER.parse(source.encode()).root_node
    scopes = (
        "left_assignment_expression",
        "script_parameter",
        "function_parameter_declaration",
        "foreach_statement",
    )
    places = [place for kind in scopes for place in nodes(root, kind)]
    given = {name for place in places for name in map(_name, nodes(place, "variable"))}
    used = {_name(node) for node in nodes(root, "variable")}
    return used - given - AUTOMATIC


def test_the_powershell_script_reads_what_was_set() -> None:
    assert unset(POWER) == set()
    assert unset("function A([string] $Name) { $x = 1; Say $Naem $x }") == {"naem"}


def _name(node: tree_sitter.Node) -> str:
    text = (node.text or b"").decode().lower()
    return text.lstrip("$@").strip("{}").removeprefix("env:")


def test_both_installers_have_the_same_options_and_checks() -> None:
    options = r"^  (--[a-zA-Z, -]+?)  +[a-z]"
    checks = r"(?:check|Invoke-Check) [\"']([a-z -]+)[\"']"
    for pattern in (options, checks):
        shell, power = (re.findall(pattern, text, re.M) for text in (SHELL, POWER))
        assert shell == power
        assert len(shell) >= 6


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("system", "says"),
    [("Darwin", "macOS is not supported"), ("MINGW64_NT", "run install.ps1 in PowerShell")],
)
def test_other_systems_are_refused_at_once(tmp_path: Path, system: str, says: str) -> None:
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {system}\n", encoding="utf-8")
    (tmp_path / "uname").chmod(0o755)
    (tmp_path / "install.sh").write_text(SHELL, encoding="utf-8")
    done = subprocess.run(
        ["bash", str(tmp_path / "install.sh")],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=60,
    )
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no bash; install.ps1 isn't run")
def test_the_path_is_only_changed_where_that_is_wanted(tmp_path: Path) -> None:
    """The function of the shell script, beside a stand-in for molink."""
    begin = SHELL.index("offer_path() {")
    function = SHELL[begin : SHELL.index("\n}\n", begin) + 3]
    program = tmp_path / "clone" / ".venv" / "bin" / "molink"
    program.parent.mkdir(parents=True)
    program.touch()
    link = tmp_path / "home" / ".local" / "bin" / "molink"

    def offer(path: str) -> str:
        script = f'set -eu; die() {{ echo "$1"; exit 1; }}; path={path!r}\n{function}\noffer_path'
        environment = {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
        return subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path / "clone",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    assert "./install.sh --path" in offer("")
    assert not link.exists()
    said = offer("1")
    assert "is not on your PATH" in said
    assert link.resolve() == program
    assert "is a link" not in offer("1"), "it is there"
    link.unlink()
    link.write_text("of somebody", encoding="utf-8")
    assert "is not a link" in offer("1")
    assert link.read_text(encoding="utf-8") == "of somebody"
