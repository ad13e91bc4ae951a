"""``molink list``, ``show`` and ``rm``."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from molink.checkpoint import hub
from molink.checkpoint.model_source import find_demo_model
from molinkd.cli import local_models
from molinkd.cli.main import run
from molinkd.peer.artifacts import installed_models
from molinkd.peer.home import Home
from tests.support.fake_hub import REPOSITORY, FakeHub, in_place
from tests.support.gguf_models import Kind, write_gguf
from tests.support.models import MakeModel


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(installed_models, "downloads_folder", lambda: tmp_path / "downloads")
    return Home(tmp_path / "home")


@pytest.fixture
def served(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: MakeModel
) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "RETRY_DELAYS_S", (0.0,))
    with in_place(make_model(tmp_path / "model"), tmp_path / "cache", monkeypatch) as made:
        yield made


def test_pull_list_and_rm(served: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", REPOSITORY]) == 0
    assert f"{REPOSITORY} is available at " in capsys.readouterr().out
    served.asked.clear()
    assert run(["pull", REPOSITORY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == REPOSITORY
    assert served.asked == []

    assert run(["list", "--json"]) == 0
    (cached, _) = json.loads(capsys.readouterr().out)
    assert (cached["name"], cached["where"], cached["served"]) == (REPOSITORY, "cache", False)
    assert run(["list"]) == 0
    assert REPOSITORY in capsys.readouterr().out

    assert run(["rm", REPOSITORY]) == 2
    assert "--hf-cache" in capsys.readouterr().err
    assert run(["rm", REPOSITORY, "--hf-cache"]) == 0
    assert "B freed" in capsys.readouterr().out
    assert run(["rm", REPOSITORY, "--hf-cache"]) == 5


def test_a_model_that_is_served_is_not_deleted(
    served: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["pull", REPOSITORY]) == 0
    monkeypatch.setattr(local_models, "_served_models", lambda _: ["some-model"])
    assert run(["rm", REPOSITORY, "--hf-cache"]) == 2
    assert "is being served: run `molink stop` first" in capsys.readouterr().err
    capsys.readouterr()
    assert run(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["served"] is True


def test_each_model_is_a_line_of_80_columns(
    served: FakeHub,
    home: Home,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paths are long; they are for `molink show` and JSON."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "Qwen3-30B-A3B-Instruct-2507-UD-Q4_K_XL"
    (home.unpacked / f"{name}-{'0' * 16}").mkdir(parents=True)
    assert run(["pull", REPOSITORY]) == 0
    capsys.readouterr()
    assert run(["list"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["model", "size", "where"]
    assert [line.split()[0] for line in lines] == [REPOSITORY, name, "molink-demo"]
    assert max(map(len, lines)) <= 80


def test_list_imports_little(home: Home) -> None:
    slow = ("asyncio", "zmq", "rich", "numpy", "torch", "molink.checkpoint.config")
    code = (
        "import sys; from molinkd.cli.main import run; code = run(['list']); "
        f"print(code, sorted(set({slow}) & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_the_small_models_copies_are_listed_and_deleted(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies are the downloaded file, an interrupted download, and the files of a killed demo."""
    name = "SmolLM2-135M-Instruct.Q4_1"
    downloads, demo = tmp_path / "downloads", home.demo_home(2).demo_peer(1)
    (downloads / "fetching-1").mkdir(parents=True)
    files = [
        downloads / f"{name}.gguf",
        downloads / "fetching-1" / "half.whl",
        demo.unpacked / f"{name}-{'0' * 16}" / "model.safetensors",
    ]
    files[2].parent.mkdir(parents=True)
    for file in files:
        file.write_bytes(bytes(1000))
    assert run(["list", "--json"]) == 0
    found = [(one["where"], one["size"]) for one in json.loads(capsys.readouterr().out)[:-1]]
    assert found == [("download", 1000), ("download", 1000), ("demo", 1000)]
    assert run(["rm", "smollm2"]) == 0
    assert capsys.readouterr().out == "Deleted smollm2: 3.0 kB freed.\n"
    assert [file for file in files if file.exists()] == []


def test_the_models_of_additional_devices_are_listed(home: Home, tmp_path: Path) -> None:
    assert home.device_homes() == []
    device = home.devices / "me" / "cuda.1"
    device.mkdir(parents=True)
    assert home.device_homes() == [Home(device)]


def test_show_a_folder(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "molink-demo"]) == 0
    out = capsys.readouterr().out
    facts = {line[:15].strip(): line[15:] for line in out.splitlines()}
    path = find_demo_model().path
    assert facts.pop("size") == "10.6 MB"
    assert facts == {
        "model": "molink-demo",
        "architecture": "qwen2",
        "parameters": "5.3 M",
        "layers": "8",
        "context": "2048 tokens",
        "quantization": "none (bf16)",
        "chat template": "yes",
        "images": "no",
        "bundled": str(path),
    }


def test_show_a_gguf_file_and_a_model_card(
    home: Home, tmp_path: Path, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model(tmp_path / "plain", "llama")
    (folder / "README.md").write_text("---\ntags: [a]\nlicense: mit\n---\n", encoding="utf-8")
    file = write_gguf(
        folder, tmp_path / "some.gguf", Kind.Q8_0, metadata={"general.license": "apache-2.0"}
    )
    shown = []
    for path in (folder, file):
        assert run(["show", str(path), "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    plain, packed = shown
    assert (plain["license"], packed["license"]) == ("mit", "apache-2.0")
    assert (plain["quantization"], packed["quantization"]) == ("none (f32)", "Q8_0")
    assert (plain["copies"][0]["path"], packed["name"]) == (str(folder), "some")
    for fact in ("architecture", "parameters", "layers", "context"):
        assert plain[fact] == packed[fact]


def test_show_says_what_it_cannot_read(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", "owner/none"]) == 5
    assert run(["show", "qwen3.5"]) == 5
    said = capsys.readouterr().err
    assert "qwen3.5:9b is not on this PC" in said
    assert "pull qwen3.5:9b" in said
    assert "(5.6 GB, Apache-2.0)" in said
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["Odd"]}', encoding="utf-8")
    assert run(["show", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert "trouble" in out
    assert "Odd" in out
