"""A hub or mirror that lies: `molink pull` changes no file outside the hub's cache."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from molink.checkpoint import hub as hub_client
from molinkd.cli.main import run
from tests.support.fake_hub import REPOSITORY, FakeHub, in_place
from tests.support.models import write_plain_model

#: From the folders of blobs and of a snapshot to the folder with the targets.
FROM_BLOBS, FROM_SNAPSHOT = "../../..", "../../../.."
WEIGHTS = "model-00001-of-00002.safetensors"
TOKENIZER = "tokenizer_config.json"
LARGE = {"lfs": {"sha256": "a" * 64, "size": 1, "pointerSize": 100}}

Lie = Callable[[FakeHub, Path], str]


def has_hash(template: str) -> Lie:
    def lie(hub: FakeHub, outside: Path) -> str:
        said = template.format(outside=outside)
        hub.lies[WEIGHTS] = {"lfs": {"sha256": said, "size": 9**6, "pointerSize": 100}}
        hub.lies[WEIGHTS]["size"] = 9**6
        return said

    return lie


def has_name(template: str, file: str = WEIGHTS, **fields: object) -> Lie:
    def lie(hub: FakeHub, outside: Path) -> str:
        said = template.format(outside=outside)
        hub.lies[file] = {"rfilename": said, **fields}
        return said

    return lie


def has_blob_id(hub: FakeHub, outside: Path) -> str:
    hub.lies[TOKENIZER] = {"blobId": f"{FROM_BLOBS}/new.json"}
    return f"{FROM_BLOBS}/new.json"


def has_commit(hub: FakeHub, outside: Path) -> str:
    hub.commit = hub.header_commit = f"../{FROM_BLOBS}/new"
    return hub.commit


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user with the hub's cache and other files."""
    folder = tmp_path / "user"
    folder.mkdir()
    for name in ("target", "target.json", "target.safetensors"):
        (folder / name).write_bytes(name.encode() * 100)
    return folder


@pytest.fixture
def hub(tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setattr(hub_client, "RETRY_DELAYS_S", (0.0,))
    with in_place(write_plain_model(tmp_path / "model"), outside / "cache", monkeypatch) as made:
        (made.folder / WEIGHTS).write_bytes(next(made.folder.glob("*.safetensors")).read_bytes())
        yield made


def content(folder: Path) -> dict[Path, bytes]:
    """All files except those of the cache."""
    cache = folder / "cache"
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in paths if not path.is_relative_to(cache)}


def pull(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and errors of ``molink pull``."""
    return run(["pull", REPOSITORY]), capsys.readouterr().err


@pytest.mark.parametrize(
    "lie",
    [
        has_hash(f"{FROM_BLOBS}/target"),
        has_hash("{outside}/target"),
        has_hash("C:\\target"),
        has_name(f"sub/../{FROM_SNAPSHOT}/target.json", TOKENIZER, size=9**6, **LARGE),
        has_name(f"{FROM_SNAPSHOT}/target.json", TOKENIZER, size=9**6, **LARGE),
        has_name("{outside}/target.json", TOKENIZER, size=9**6, **LARGE),
        has_name("..\\..\\..\\..\\target.json", TOKENIZER),
        has_name("config.json:target.json", TOKENIZER),
        has_name("sub/NUL.json", TOKENIZER),
        has_name("\x1b[2Jconfig.json", TOKENIZER),
        has_blob_id,
        has_commit,
    ],
)
def test_a_lie_in_the_list_of_files(
    capsys: pytest.CaptureFixture[str], hub: FakeHub, outside: Path, lie: Lie
) -> None:
    before, said = content(outside), lie(hub, outside)
    code, error = pull(capsys)
    assert content(outside) == before
    assert code == 5, error
    assert f"{REPOSITORY} on the hub" in error
    assert ascii(said) in error
    assert "\x1b" not in error
    assert not (outside / "cache").exists()


def test_a_lie_in_an_etag(capsys: pytest.CaptureFixture[str], hub: FakeHub, outside: Path) -> None:
    """The hub's library would name the file after it; molink asks for no ETags."""
    before = content(outside)
    hub.etags = {TOKENIZER: f"{FROM_BLOBS}/new.json"}
    code, error = pull(capsys)
    assert content(outside) == before
    assert code == 0, error


def test_a_lie_about_the_commit_of_a_missing_file(
    capsys: pytest.CaptureFixture[str], hub: FakeHub, outside: Path
) -> None:
    """The hub's library would remember the missing file in a folder of that name."""
    before = content(outside)
    hub.missing = {TOKENIZER}
    hub.header_commit = f"{FROM_BLOBS}/new"
    code, error = pull(capsys)
    assert content(outside) == before
    assert code == 12, error
    assert f"refuses {REPOSITORY}" in error
