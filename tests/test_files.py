import ntpath
import posixpath
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from molink import files
from molink.files import (
    find_path_fault,
    is_plain,
    make_plain_name,
    resolve_inside,
    retry_while_busy,
)

#: Parts of hostile names.
PARTS = ("..", ".", "NUL", "con", "COM1", "com¹", "lpt9", "CONIN$", "a", "é", "模", ".json", "~")
MARKS = ("/", "\\", ":", "C:", "$DATA", " ", "*", "?", "\0", "\n", "\x1b[2J", "\u202e", "\ud800")
BITS = st.sampled_from((*PARTS, *MARKS))
NAMES = st.lists(BITS, max_size=8).map("".join) | st.text(max_size=20)
FOLDERS = [
    (PureWindowsPath("C:\\home\\models"), ntpath),
    (PurePosixPath("/home/models"), posixpath),
]
links = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")


class Locked:
    """An operation that is denied a few times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise PermissionError("in use")
        return "done"


def test_retries_are_for_windows_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSE_S", 0.0)
    monkeypatch.setattr(files, "_IS_WINDOWS", False)
    with pytest.raises(PermissionError):
        retry_while_busy(Locked(1))
    monkeypatch.setattr(files, "_IS_WINDOWS", True)
    assert retry_while_busy(Locked(3)) == "done"
    with pytest.raises(PermissionError):
        retry_while_busy(Locked(1), 0.0)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("p1", "p1"),
        ("../../x", "x"),
        ("a:b\\c", "a_b_c"),
        ("con", "_con"),
        ("LPT1.v2", "_LPT1.v2"),
        ("cond", "cond"),
        ("...", "otherwise"),
    ],
)
def test_plain_names(text: str, plain: str) -> None:
    assert make_plain_name(text, "otherwise") == plain


@given(NAMES)
@example("../x")
@example("a/../../x")
@example("NUL .json")
def test_a_path_without_fault_stays_inside_on_any_system(name: str) -> None:
    fault = find_path_fault(name)
    assert not (is_plain(name) and fault), "the narrower rule implies the wider one"
    if fault:
        return
    for folder, rules in FOLDERS:
        path = folder / name
        assert path.parts == (*folder.parts, *name.split("/")), "nothing has another meaning"
        assert rules.normpath(path) == str(path)
        assert path.is_relative_to(folder)
    for part in name.split("/"):
        assert part == part.rstrip(". ")
        stem = part.partition(".")[0].rstrip().upper()
        assert stem not in {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"}
        assert not (stem[:3] in ("COM", "LPT") and stem[3:] in {*"0123456789¹²³"})
    assert name.isprintable()
    assert not {*name} & {*'<>:"|?*\\'}


@given(st.lists(st.from_regex(r"x[A-Za-z0-9_.é模 -]{0,20}[a-z]", fullmatch=True), max_size=5))
def test_usual_names_have_no_fault(parts: list[str]) -> None:
    assert not find_path_fault("/".join(["Q4", *parts, "model-00001-of-00002.safetensors"]))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "is absolute"),
        ("/etc/passwd", "is absolute"),
        ("a//b", "is absolute"),
        ("a/", "is absolute"),
        ("..", "leads out"),
        ("a/../b", "leads out"),
        ("C:/x", "has a :"),
        ("x.json:stream", "has a :"),
        ("..\\x", "has a \\"),
        ("a\nb", "control characters"),
        ("a\u202eb", "control characters"),
        ("\ud800", "control characters"),
        ("a./b", "dot or a space"),
        ("a ", "dot or a space"),
        ("sub/NUL", "device"),
        ("com1.json", "device"),
        ("LPT³.x.json", "device"),
        ("é" * 128, "more than 255 bytes"),
        ("/".join(["ab"] * 400), "more than 1024 bytes"),
    ],
)
def test_faults_are_named(name: str, fault: str) -> None:
    assert fault in find_path_fault(name)


def test_paths_outside_are_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    assert resolve_inside(folder, folder / "new" / "x") == folder.resolve() / "new" / "x"
    for path in (folder, folder / "..", folder / "../x", outside / "x", folder / "a/../../x"):
        with pytest.raises(OSError, match="is outside of"):
            resolve_inside(folder, path)


def test_folders_that_appear_meanwhile_keep_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows ``Path.resolve`` returns ``\\\\?\\C:\\…`` if another thread creates the folder."""
    folder, resolve = tmp_path / "folder", Path.resolve

    def resolve_in_a_race(path: Path) -> Path:
        found = str(resolve(path))
        return Path(found if path != folder else "\\\\?\\" + found)

    monkeypatch.setattr(Path, "resolve", resolve_in_a_race)
    found = resolve_inside(folder, folder / "new" / "x")
    assert found == resolve(tmp_path) / "folder" / "new" / "x"


@links
def test_links_are_resolved_before_a_path_is_checked(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "link").symlink_to(outside)
    with pytest.raises(OSError, match="is outside of"):
        resolve_inside(folder, folder / "link" / "x")
    assert resolve_inside(folder, folder / "link") == folder.resolve() / "link"
    (tmp_path / "other").symlink_to(folder)
    assert resolve_inside(tmp_path / "other", folder / "x") == folder.resolve() / "x"
