"""Texts in German and Chinese: the catalogues are complete, and translations fit the screen."""

import gettext
import os
import string
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from rich.cells import cell_len

from molinkd.cli import translation
from molinkd.cli.doctor import command
from molinkd.cli.main import run
from molinkd.cli.plain_table import wrap_text
from molinkd.cli.top.layout import screen_lines
from molinkd.cli.top.view import make_view
from tests.molinkd.cli.doctor.situations import facts, host, network, swarm
from tests.molinkd.cli.test_status_table import show
from tests.molinkd.cli.top import swarms
from tools import translate


def forms(text: object) -> tuple[str, ...]:
    return text if isinstance(text, tuple) else (str(text),)


def placeholders(text: str) -> list[str]:
    """Values of a text with their formats, and the commands in backticks."""
    fields = string.Formatter().parse(text)
    named = [f"{name}!{form}:{spec}" for _, name, spec, form in fields if name is not None]
    return sorted([*named, *text.split("`")[1::2]])


@pytest.fixture
def speak(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``speak(language)`` sets the language of the user's shell."""

    def set_language(language: str) -> None:
        monkeypatch.setenv("LANGUAGE", language)
        translation.use_own_language([])

    return set_language


@pytest.mark.parametrize("language", translate.LANGUAGES)
def test_every_text_is_translated(language: str) -> None:
    """If this fails, run ``python -m tools.translate`` and translate what it names."""
    catalogue = translate.read_catalogue(language)
    messages = {message.id: message for message in catalogue if message.id}
    assert messages.keys() == translate.collect_texts()
    assert [text for text, message in messages.items() if not translate.is_whole(message)] == []
    for text, message in messages.items():
        wanted = placeholders(forms(text)[-1])
        assert all(placeholders(form) == wanted for form in forms(message.string)), text
        assert {form[:1].isspace() for form in forms(message.string)} == {
            forms(text)[0][:1].isspace()
        }, text


@pytest.mark.parametrize("language", translate.LANGUAGES)
def test_compiled_catalogues_are_up_to_date(language: str) -> None:
    with translate.mo_path(language).open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    for message in translate.read_catalogue(language):
        if isinstance(message.id, tuple):
            shown = tuple(compiled.ngettext(*message.id, count) for count in (1, 2))
            assert shown == (message.string * 2)[:2]
        elif message.id:
            assert compiled.gettext(message.id) == message.string


def check_widths(lines: Iterable[str], width: int) -> None:
    assert [line for line in lines if cell_len(line) > width] == []


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("de", ("Aufruf: molink", "Befehle:", "Diesen PC prüfen und Abhilfe nennen.")),
        ("zh_CN", ("用法：molink", "命令:", "检查本机并建议修复方法。")),
        ("zh_TW:zh_HK", ("Usage: molink", "Commands:", "Check this PC and suggest fixes.")),
        ("xx", ("Usage: molink", "Commands:", "Check this PC and suggest fixes.")),
    ],
)
def test_help(
    speak: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    language: str,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    speak(language)
    for arguments in ([], ["join"]):
        assert run([*arguments, "--help"]) == 0
        out = capsys.readouterr().out
        check_widths(out.splitlines(), 80)
        assert words[0] in out
        if not arguments:
            assert all(word in out for word in words)
    assert run(["join", "--oops"]) == 2
    error = capsys.readouterr().err
    assert error.startswith({"de": "Fehler: ", "zh_CN": "错误: "}.get(language, "error: "))


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("de", ("Problem  Platte", "0.0 GB frei auf der Platte", "1 Problem, 1 Warnung.")),
        ("zh_CN", ("问题  磁盘", "状态文件夹所在磁盘剩余 0.0 GB", "1 个问题, 1 个警告.")),
    ],
)
def test_doctor(
    speak: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    language: str,
    words: tuple[str, ...],
) -> None:
    speak(language)
    known = facts(
        host=host(free_bytes=1, model_bytes=1),
        network=network(multicast_error="no"),
        daemon_pid=5,
        swarm=swarm(trouble="x"),
    )
    monkeypatch.setattr(command, "collect_facts", lambda *_: known)
    assert run(["doctor", "--home", "nowhere"]) == 1
    out = capsys.readouterr().out
    report = out.partition("\n\n")[0].splitlines()
    names = [f" {translation.tr(name)} " for name in ("daemon", "disk", "ports", "sleep")]
    starts = {
        cell_len(line[: line.index(name)]) for name in names for line in report if name in line
    }
    assert starts == {8 if language == "de" else 5}
    for word in words:
        assert word in out


@pytest.mark.parametrize("language", translate.LANGUAGES)
@pytest.mark.parametrize("width", [80, 120])
def test_top(speak: Callable[[str], None], language: str, width: int) -> None:
    speak(language)
    for make in (swarms.serving, swarms.several, swarms.pairing, swarms.long_names):
        view = make_view(swarms.decode(make()))
        check_widths((line.plain for line in screen_lines(view, width)), width)
    lines = [line.plain for line in screen_lines(make_view(swarms.decode(swarms.serving())), width)]
    title = next(line for line in lines if translation.tr("weights+KV/all") in line)
    row = lines[lines.index(title) + 2]
    device = translation.tr("device")
    before = row[: row.index("cuda")]
    assert cell_len(title[: title.index(device)]) == cell_len(before)
    assert cell_len(title[: title.index(translation.tr("step"))]) > cell_len(before)


@pytest.mark.parametrize("language", translate.LANGUAGES)
def test_status(
    speak: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    language: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    speak(language)
    show(swarms.serving())
    out = capsys.readouterr().out
    assert translation.tr("weights+KV/all") in out
    assert {"de": "Rolle", "zh_CN": "角色"}[language] in out
    lines = out.splitlines()
    head = next(line for line in lines if translation.tr("role") in line)
    ends = cell_len(head[: head.index(translation.tr("role"))])
    stage = translation.tr("stage {number}", number=1)
    row = next(line for line in lines if stage in line)
    assert cell_len(row[: row.index(stage)]) == ends


def test_wide_text_is_wrapped_anywhere_and_words_are_not() -> None:
    text = "模型 molink_model_name 已就绪。" * 3
    lines = wrap_text(text, 24)
    check_widths(lines, 24)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert sum(line.count("molink_model_name") for line in lines) == 3
    assert wrap_text("一" * 15, 20) == ["一" * 10, "一" * 5]


def test_json_is_english(tmp_path: Path) -> None:
    """Programs read it, and its errors."""
    words = [sys.executable, "-m", "molinkd", "approve", "--refuse", "--home", str(tmp_path)]
    environment = {**os.environ, "LANGUAGE": "de"}
    for options, start in (([], "Fehler: "), (["--json"], "error: ")):
        ended = subprocess.run(
            [*words, *options], env=environment, capture_output=True, encoding="utf-8", check=False
        )
        assert ended.stderr.startswith(start), ended.stderr
        assert ended.returncode == 2


def test_windows_says_its_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(translation, "user_language", lambda: "de_AT")
    translation.use_own_language([])
    assert translation.tr("Done?") == "Done?"
    assert translation.tr("Nothing was changed.") == "Nichts wurde geändert."
