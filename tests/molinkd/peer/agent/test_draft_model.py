"""A draft model before anything runs: whose tokens it has, and what it takes."""

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.errors import ModelNotFound, UsageError
from molink.facts.device import Device
from molink.facts.footprint import StageSetup
from molink.swarm.controller.planner import offer_of
from molinkd.peer.agent.device_probe import Measured
from molinkd.peer.agent.draft_model import DraftModel
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.home import Home
from molinkd.peer.settings import load_settings
from tests.support.swarm import report


def find(path: Path) -> DraftModel:
    return DraftModel.find(str(path), path.parent, Progress(), threading.Event())


def renamed(folder: Path, old: str, new: str) -> None:
    """Another text for one token."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[new] = vocabulary.pop(old)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def test_a_model_of_the_same_tokens_may_draft(make_model: Any, tmp_path: Path) -> None:
    served = make_model(tmp_path / "served", "llama")
    find(make_model(tmp_path / "draft", seed=3)).check(served)


def test_one_of_other_tokens_is_refused_by_name(make_model: Any, tmp_path: Path) -> None:
    served = make_model(tmp_path / "served")
    draft = find(make_model(tmp_path / "draft"))
    renamed(tmp_path / "draft", "a", "aa")
    with pytest.raises(UsageError) as caught:
        draft.check(served)
    text = str(caught.value)
    assert text.startswith(f"--draft-model {tmp_path / 'draft'} has another vocabulary")
    assert "is 'aa' there, and 'a' here" in text


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        find(tmp_path / "nothing")


def test_it_takes_kv_for_some_requests_and_no_more(make_model: Any, tmp_path: Path) -> None:
    model = find(make_model(tmp_path / "draft"))
    config = model.folder.config
    token = 2 * config.layers * config.kv_heads * config.head_dim * 4
    for context, tokens in ((64, 16384), (1 << 20, -(-16384 // config.context) * config.context)):
        planned = model.plan(StageSetup(dtype="f32"), 1 << 30, 16, context)
        assert planned.start.kv_bytes == tokens * token
        assert planned.start.kv_bytes < planned.nbytes < planned.start.kv_bytes + (32 << 20)
    with pytest.raises(UsageError):
        model.plan(StageSetup(dtype="f32"), 100_000, 16, 64)


def test_placement_is_told_what_it_takes(make_model: Any, tmp_path: Path) -> None:
    model = find(make_model(tmp_path / "draft"))
    settings = load_settings(Home(tmp_path), {}, {"MOLINK_DTYPE": "f32"})
    measured = Measured(Device(kind="cpu", name="x", memory=1 << 30), bf16=True)
    told = model.beside(measured, settings).device
    setup = measured.setup(settings.pipeline, "f32")
    planned = model.plan(setup, 1 << 30, 16, model.folder.config.context)
    assert told.draft == planned.nbytes > planned.start.kv_bytes
    offered = offer_of("a", msgspec.structs.replace(report("a"), device=told))
    assert offered is not None
    assert offered.draft == told.draft
    small = Measured(Device(kind="cpu", name="x", memory=100_000), bf16=True)
    assert model.beside(small, settings) is small


def test_a_folder_is_kept_as_a_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    home = Home(tmp_path)
    for given, expected in (
        ("draft", str(tmp_path / "draft")),
        ("OWNER/NAME", "OWNER/NAME"),
        ("off", ""),
    ):
        settings = load_settings(home, {}, {"MOLINK_DRAFT_MODEL": given})
        assert settings.draft_model == expected
