"""Help texts are complete and fit 80 columns."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from molinkd.cli.lazy_commands import COMMAND_NAMES, GROUP_NAMES
from molinkd.cli.main import build_app, run


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands and groups, with the words that name them."""
    waiting: list[tuple[tuple[str, ...], Any]] = [
        ((), typer.main.get_command(build_app([*COMMAND_NAMES, *GROUP_NAMES])))
    ]
    while waiting:
        words, command = waiting.pop()
        yield words, command
        inner = getattr(command, "commands", {})
        waiting += [((*words, name), one) for name, one in inner.items()]


NAMES = [words for words, _ in commands()]


def test_every_option_has_a_text_and_shows_its_default() -> None:
    lacking = []
    for words, command in commands():
        with typer.Context(command, info_name=" ".join(("molink", *words))) as context:
            for param in command.params:
                text = (param.get_help_record(context) or ("", ""))[1]
                said = text.partition("[default:")[0].partition("[env var:")[0].strip()
                optional = param.param_type_name == "option" and not param.required
                off = getattr(param, "is_flag", False) and not param.default
                if not said or (optional and not off and "[default:" not in text):
                    lacking.append((*words, param.name, text))
    assert lacking == []


@pytest.mark.parametrize(("command", "first"), [("up", "--model"), ("join", "--swarm")])
def test_options_are_grouped_with_the_most_used_first(
    command: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    panels = [line for line in lines if line in ("Common:", "Network:", "Device:", "Advanced:")]
    assert panels == ["Common:", "Network:", "Device:", "Advanced:"]
    assert lines[lines.index("Common:") + 1].split()[0] == first


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_help_fits_80_columns_without_truncation(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(r"[^]]\.\.\.$", out, re.M)
    assert "…" not in out
    assert "\\[" not in out


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("molink un-", ["un-revoke"]),
        ("molink top --o", ["--once"]),  # a lazily imported command
        ("molink config un", ["unset"]),
        ("molink up --quantize n", ["none", "nf4"]),
    ],
)
def test_shell_completion(
    typed: str,
    found: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("_MOLINK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert run([]) == 0
    assert capsys.readouterr().out.split() == found
