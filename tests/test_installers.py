"""Output and choices of ``install.sh`` and ``install.ps1``; the latter is not run here."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree_sitter
import tree_sitter_powershell

from tests.support.command_lines import check_command
from tests.support.release_server import ReleaseServer, serve_release

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
    ("system", "machine", "says"),
    [
        ("Darwin", "x86_64", "needs a Mac with Apple silicon"),
        ("Darwin", "arm64", "needs macOS 14 or newer"),
        ("MINGW64_NT", "x86_64", "run install.ps1 in PowerShell"),
    ],
)
def test_other_systems_are_refused_at_once(
    tmp_path: Path, system: str, machine: str, says: str
) -> None:
    uname = f"#!/bin/sh\n[ $1 = -m ] && echo {machine} || echo {system}\n"
    for name, text in (("uname", uname), ("sw_vers", "#!/bin/sh\necho 13.7.1\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
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


#: Replaces the Python of ``.venv``: records pip's arguments, and "installs" molink.
STAND_IN = """#!/bin/sh
case "$*" in
  *"pip install"*)
    echo "$@" >> "$HOME/pip.log"
    printf '#!/bin/sh\\necho "molink $@" >> "$HOME/pip.log"\\n' > .venv/bin/molink
    chmod +x .venv/bin/molink ;;
  *"pip --version"*) ;;
  *) exec {python} -S "$@" ;;
esac
"""


class PipedInstaller:
    """``curl URL/install.sh | bash`` on a PC whose ``.venv`` is a fake."""

    def __init__(self, home: Path, server: ReleaseServer) -> None:
        self.home, self.server = home, server
        self.root = home / ".local" / "share" / "molink"
        python = self.root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
        python.chmod(0o755)
        #: A folder that looks like a clone, which a piped script must not use.
        self.elsewhere = home / "clone"
        self.elsewhere.mkdir()
        (self.elsewhere / "pyproject.toml").touch()

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        stamped = SHELL.replace("RELEASES=''", f"RELEASES='{self.server.url}'")
        return subprocess.run(
            ["bash", "-s", "--", "--cpu", *options],
            input=stamped,
            cwd=self.elsewhere,
            env={"HOME": str(self.home), "PATH": os.environ["PATH"]},
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=60,
        )

    def asked(self) -> list[str]:
        log = self.home / "pip.log"
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


@pytest.fixture
def piped(tmp_path: Path) -> Iterator[PipedInstaller]:
    with serve_release() as server:
        yield PipedInstaller(tmp_path, server)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_without_a_clone_the_newest_release_is_installed(piped: PipedInstaller) -> None:
    wheel = piped.server.publish("1.2.3", {})
    done = piped.run()
    assert done.returncode == 0, done.stderr
    needed, own, torch = piped.asked()
    assert needed.endswith("--require-hashes --no-deps -r download/requirements.txt")
    assert own.endswith(f"--no-deps download/{wheel}")
    assert torch == "molink setup --cpu"
    assert not (piped.root / "download").exists()
    link = piped.home / ".local" / "bin" / "molink"
    assert link.resolve() == piped.root / ".venv" / "bin" / "molink"
    assert piped.run().returncode == 0
    again = [line for line in piped.asked()[3:] if line != "molink --version"]
    assert again == [f"molink update --from {piped.server.url}", "molink setup --cpu"]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize("fault", ["cut", "altered", "missing", "no release"])
def test_a_release_that_is_not_whole_is_not_installed(fault: str, piped: PipedInstaller) -> None:
    wheel = piped.server.publish("1.2.3", {})
    if fault == "cut":
        piped.server.cut.add(wheel)
    elif fault == "altered":
        piped.server.files["requirements.txt"] = b"evil==1.0"
    elif fault == "missing":
        del piped.server.files[wheel]
    else:
        piped.server.files["SHA256SUMS"] = b"<html>"
    done = piped.run()
    said = {"altered": "don't have the hashes", "no release": "names no wheel of molink"}
    assert (done.returncode, said.get(fault, "can't be fetched") in done.stderr) == (1, True)
    assert piped.asked() == []
    assert sorted(path.name for path in piped.root.iterdir()) == [".venv"]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--from", "http://example.org"], "releases come by https alone"),
        (["--from", ""], "say where releases are"),
        (["--test"], "--test needs a clone"),
    ],
)
def test_a_release_needs_a_safe_place(options: list[str], says: str, piped: PipedInstaller) -> None:
    done = piped.run(*options)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert piped.server.asked == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no bash; install.ps1 isn't run")
def test_the_path_is_only_changed_on_request(tmp_path: Path) -> None:
    """Runs the shell script's function, beside a fake molink."""
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


def test_the_setup_program_brings_the_installer_and_takes_molink_away() -> None:
    script = (ROOT / "deploy" / "windows" / "molink.iss").read_text(encoding="utf-8")
    (folder,) = re.findall(r"^DefaultDirName=\{localappdata\}\\(.+)$", script, re.M)
    assert f"Join-Path $env:LOCALAPPDATA '{folder}'" in POWER
    assert re.findall(r'^Source: "\{#Release\}\\([\w.]+)"', script, re.M) == ["install.ps1"]
    (words,) = re.findall(r'Parameters: "-m molinkd ([^"]+)"', script)
    check_command(words.split())
    (licence,) = re.findall(r"^LicenseFile=(.+)$", script, re.M)
    assert (ROOT / "deploy" / "windows" / licence.replace("\\", "/")).resolve() == ROOT / "LICENSE"
