"""What ``install.sh`` and ``install.ps1`` say and choose; neither is run here."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tree_sitter
import tree_sitter_powershell

ROOT = Path(__file__).resolve().parent.parent
SHELL = (ROOT / "install.sh").read_text(encoding="utf-8")
POWER = (ROOT / "install.ps1").read_text(encoding="utf-8")
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_powershell.language()))
#: Commands of Windows PowerShell 5.1 that the script may use.
BUILT_IN = {
    "ForEach-Object",
    "Get-Content",
    "Get-FileHash",
    "Join-Path",
    "New-Object",
    "Remove-Item",
    "Select-Object",
    "Select-String",
    "Set-Content",
    "Set-Location",
    "Test-Path",
    "Where-Object",
    "Write-Host",
}
#: Variables that PowerShell sets itself.
AUTOMATIC = {"_", "args", "false", "matches", "null", "true", "lastexitcode", "psscriptroot"} | {
    "psversiontable"
}


def load_cuda_index() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "cuda_index", ROOT / "requirements" / "cuda_index.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cuda_index = load_cuda_index()


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


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        ("581.15", 8.9, "cu130"),
        ("580.65.06", 12.0, "cu130"),
        ("560.94", 8.6, "cu126"),
        ("528.49", 7.5, "cu126"),
        ("600", 7.5, "cu130"),
    ],
)
def test_the_build_suits_the_driver(driver: str, capability: float, build: str) -> None:
    assert cuda_index.build_for(driver, capability) == build


@pytest.mark.parametrize(("driver", "capability"), [("516.94", 8.6), ("572.16", 12.0)])
def test_a_driver_that_is_too_old_is_said(driver: str, capability: float) -> None:
    with pytest.raises(cuda_index.TooOld, match=f"driver {driver} is too old.*580.*--cpu"):
        cuda_index.build_for(driver, capability)


def test_what_nvidia_smi_says_is_read() -> None:
    assert cuda_index.read("560.94, 8.6\n560.94, 12.0\n") == ("560.94", 12.0)
    assert cuda_index.read("") is None
    assert cuda_index.read("NVIDIA-SMI has failed\n") is None
    assert cuda_index.ask((sys.executable, "-c", "print('560.94, 8.6')")) == "560.94, 8.6\n"
    assert cuda_index.ask(("no-such-program",)) == ""
    assert cuda_index.ask((sys.executable, "-c", "import sys; sys.exit(9)")) == ""
