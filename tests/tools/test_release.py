"""A release has the same bytes on every PC, and lists its files."""

import hashlib
import json
import os
import re
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import molink
from tools import release
from tools.release import build_archive, build_wheel, copy_source, make_release, read_epoch

URL = "https://example.org/molink"
KEY = "RWS6duQ4u43hED5wTmV8naDya/5HTHS4JtqCFNx/Ft+sGxlmBxc1Ya/x"


def read_sums(folder: Path) -> dict[str, str]:
    lines = (folder / release.SUMS).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


@pytest.mark.skipif(os.name == "nt", reason="a wheel of Windows is another one")
@pytest.mark.slow
def test_the_archive_makes_the_same_wheel(built_wheel: Path, tmp_path: Path) -> None:
    epoch = read_epoch()
    found = []
    for name in ("one", "two"):
        source = copy_source(tmp_path / name / "source", epoch)
        found.append(build_archive(source, tmp_path / name, epoch))
    assert found[0].read_bytes() == found[1].read_bytes()
    with tarfile.open(found[0]) as archive:
        assert {member.uname for member in archive} == {""}
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    wheel = build_wheel(source, tmp_path, epoch)
    assert wheel.read_bytes() == built_wheel.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release without its source archive, which a slow test covers."""
    folder = tmp_path_factory.mktemp("release") / URL.rpartition("/")[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "build_archive", lambda *_: None)
        make_release(folder, URL, key=KEY)
    return folder


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights, so a wheel is another one")
def test_a_wheel_depends_on_its_source_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mask = os.umask(0o077)
    try:
        source = copy_source(tmp_path / "elsewhere" / "source", read_epoch(), URL, key=KEY)
        wheel = build_wheel(source, tmp_path, read_epoch())
    finally:
        os.umask(mask)
    assert wheel.read_bytes() == (folder / wheel.name).read_bytes()


def test_a_release_says_where_it_is(folder: Path) -> None:
    sums = read_sums(folder)
    assert set(sums) == {path.name for path in folder.iterdir()} - {release.SUMS}
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    wheel = folder / f"molink-{molink.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as packed:
        (path,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(packed.read(path))
        assert packed.read("molink/data/release.key").decode().strip() == KEY
    assert metadata["Version"] == molink.__version__
    assert metadata.get_all("Project-URL") == [f"Releases, {URL}"]
    assert not any(
        re.match(r"(torch|bitsandbytes|triton)\b(?!.*extra)", line)
        for line in metadata.get_all("Requires-Dist") or ()
    ), "`molink setup` chooses the build"
    assert json.loads((folder / "release.json").read_text(encoding="utf-8")) == {
        "version": molink.__version__,
        "protocol": release.PROTOCOL,
        "state": release.SCHEMA_VERSION,
    }


def test_the_bill_of_materials_has_everything_once() -> None:
    bill = release.describe_components(read_epoch(), "1.2.3")
    refs = [one["bom-ref"] for one in bill["components"]]
    assert len(set(refs)) == len(refs)
    names = {one["name"] for one in bill["components"]}
    assert {"torch", "aiohttp", "triton-windows", "dompurify"} <= names
    assert "pytest" not in names
    assert "pkg:npm/%40highlightjs/cdn-assets@" in "".join(refs)


def test_another_version_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, text in (
        (["--tag", "v99.0.0"], "the tag v99.0.0 is not v"),
        (["--url", "https://a b"], "is no URL of a folder"),
        (["--key", "secret"], "is no public key of minisign"),
    ):
        monkeypatch.setattr("sys.argv", ["release", str(tmp_path / "x"), *words])
        with pytest.raises(SystemExit):
            release.main()
        assert text in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_times_are_of_the_commit_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert read_epoch() == 1_700_000_000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert read_epoch() > 0, "a ZIP archive knows no earlier time"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    monkeypatch.setattr(release, "_HISTORY", ("git", "no-such-command"))
    assert read_epoch() > 0
