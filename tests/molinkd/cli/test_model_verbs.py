"""``molink pull``, and ``run`` and ``stop`` without a daemon."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from molink.checkpoint import hub
from molinkd.cli import small_model, transfer_progress
from molinkd.cli.main import run
from molinkd.peer.artifacts.smollm2 import HubOrigin
from tests.support.fake_hub import REPOSITORY, FakeHub, in_place
from tests.support.gguf_models import write_gguf
from tests.support.models import MakeModel


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: MakeModel
) -> Iterator[FakeHub]:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hub, "RETRY_DELAYS_S", (0.0,))
    with in_place(make_model(tmp_path / "model"), tmp_path / "cache", monkeypatch) as made:
        yield made


def test_pull_without_symlinks(
    served: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows without developer mode; a warning of the hub's library would fail the test."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refuse)
    weights = min(served.folder.glob("*.safetensors")).name
    for name, copy in (("config.json", "draft.json"), (weights, "draft.safetensors")):
        same = (served.folder / name).read_bytes()
        (served.folder / copy).write_bytes(same)  # one blob, two names
    monkeypatch.setattr("huggingface_hub.file_download._are_symlinks_supported_in_dir", {})
    assert run(["pull", REPOSITORY]) == 0
    assert f"{REPOSITORY} is available at " in capsys.readouterr().out
    served.asked.clear()
    assert run(["pull", REPOSITORY]) == 0
    assert served.asked == [], "nothing is downloaded twice"


def test_pull_repairs_a_truncated_file(served: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in the cache counts as complete until it is opened."""
    assert run(["pull", REPOSITORY, "--json"]) == 0
    found = Path(json.loads(capsys.readouterr().out)["path"])
    weights = next(found.glob("*.safetensors")).resolve()
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert run(["pull", REPOSITORY]) == 0
    assert f"{REPOSITORY} is available at " in capsys.readouterr().out
    assert weights.read_bytes() == whole


def test_progress_is_shown_and_errors_have_their_codes(
    served: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_progress, "POLL_INTERVAL_S", 0.0)
    assert run(["pull", REPOSITORY]) == 0
    assert run(["pull", str(served.folder)]) == 0
    assert run(["pull", "owner/none"]) == 5
    assert run(["rm", REPOSITORY, "--hf-cache"]) == 0
    served.gated = True
    assert run(["pull", REPOSITORY]) == 12
    served.gated, served.status = False, 503
    assert run(["pull", REPOSITORY]) == 6
    for layers in ("3:1", "x"):
        assert run(["pull", REPOSITORY, "--layers", layers]) == 2
    err = capsys.readouterr().err
    for text in ("no model 'owner/none'", "is gated", "can't reach", "--layers must be A-B"):
        assert text in err
    assert f"Fetching {REPOSITORY} from the hub: " in err


@pytest.mark.parametrize("command", [["run"], ["pull"], ["up", "--model"]])
def test_an_unknown_name_is_explained(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "llama3.2:5b"]) == 5
    error = capsys.readouterr().err
    assert "no model 'llama3.2:5b'. Did you mean llama3.2:3b or llama3.2:1b? Name a model" in error
    assert "short name (`molink search`), a model of the Hugging Face hub with its owner" in error
    assert "molink-demo or smollm2" in error
    assert error.count("\n") == 1


def test_a_short_name_is_pulled_shown_and_deleted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_model: MakeModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    source, model = "Qwen/Qwen3-8B", make_model(tmp_path / "model")
    with in_place(model, tmp_path / "cache", monkeypatch, source) as hub_served:
        assert run(["pull", "qwen3:8b-bf16"]) == 0
        assert f"{source} is available at " in capsys.readouterr().out
        assert hub_served.asked
        assert run(["show", "qwen3:8b-bf16"]) == 0
        assert source in capsys.readouterr().out
        assert run(["rm", "qwen3:8b-bf16", "--hf-cache"]) == 0
        assert run(["show", "qwen3:8b-bf16"]) == 5
        # A folder of that name takes precedence over the hub.
        hub_served.asked.clear()
        model.rename(tmp_path / "qwen3")
        assert run(["pull", "qwen3"]) == 0
        assert str(tmp_path / "qwen3") in capsys.readouterr().out
        assert hub_served.asked == []


def test_a_gguf_file_of_a_short_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_model: MakeModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    write_gguf(make_model(tmp_path / "model"), tmp_path / "files" / "Qwen3-8B-Q4_K_M.gguf")
    with in_place(tmp_path / "files", tmp_path / "cache", monkeypatch, "Qwen/Qwen3-8B-GGUF"):
        assert run(["pull", "qwen3", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["model"] == "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"
        assert run(["rm", "qwen3:8b"]) == 0
        assert not Path(found["path"]).exists()


def test_the_small_model_is_fetched_by_its_name(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_model, "create_origins", lambda: (HubOrigin(REPOSITORY),))
    assert run(["pull", "smollm2"]) == 0
    assert f"{REPOSITORY} is available at" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["run", "owner/m", "hi"], ["stop"]])
def test_without_a_daemon(
    served: FakeHub, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 6
    assert "`molink up" in capsys.readouterr().err
