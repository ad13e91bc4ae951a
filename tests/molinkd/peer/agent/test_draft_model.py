"""Checks and plans of a draft model."""

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.errors import ModelNotFound, UsageError
from molink.facts.device import Device
from molink.facts.footprint import StageSetup
from molink.swarm.controller.planner import candidate_from_report
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.agent.draft_model import DraftModelFolder
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.home import Home
from molinkd.peer.settings import load_settings
from tests.support.fake_fleet import report


def find(path: Path) -> DraftModelFolder:
    return DraftModelFolder.find_draft(str(path), path.parent, Progress(), threading.Event())


def renamed(folder: Path, old: str, new: str) -> None:
    """Change the text of one token."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[new] = vocabulary.pop(old)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def test_a_model_with_the_same_vocabulary_is_accepted(make_model: Any, tmp_path: Path) -> None:
    served = make_model(tmp_path / "served", "llama")
    draft = find(make_model(tmp_path / "draft", seed=3))

    def is_accepted() -> bool:
        try:
            draft.check_served(served)
        except UsageError:
            return False
        return True

    assert is_accepted()
    renamed(tmp_path / "draft", "a", "aa")
    assert not is_accepted()
    renamed(tmp_path / "draft", "aa", "a")
    assert is_accepted(), "now the file lists this token last"


def test_a_model_with_another_vocabulary_is_rejected_by_name(
    make_model: Any, tmp_path: Path
) -> None:
    served = make_model(tmp_path / "served")
    draft = find(make_model(tmp_path / "draft"))
    renamed(tmp_path / "draft", "a", "aa")
    with pytest.raises(UsageError) as caught:
        draft.check_served(served)
    text = str(caught.value)
    assert text.startswith(f"--draft-model {tmp_path / 'draft'} has a different vocabulary")
    assert "is 'aa' instead of 'a'" in text


def test_only_a_served_model_may_have_recurrent_layers(make_model: Any, tmp_path: Path) -> None:
    states = make_model(tmp_path / "states", "qwen3_5_text")
    with pytest.raises(UsageError, match=r"--draft-model \S+states has recurrent layers"):
        find(states)
    find(make_model(tmp_path / "draft")).check_served(states)


def test_an_unknown_draft_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        find(tmp_path / "nothing")


def test_its_kv_cache_is_bounded(make_model: Any, tmp_path: Path) -> None:
    model = find(make_model(tmp_path / "draft"))
    config = model.folder.config
    token = 2 * config.layers * config.kv_heads * config.head_dim * 4
    for context, tokens in (
        (64, 16384),
        (1 << 20, -(-16384 // config.max_model_len) * config.max_model_len),
    ):
        planned = model.plan_memory(StageSetup(dtype="f32"), 1 << 30, 16, context)
        assert planned.start.kv_bytes == tokens * token
        assert planned.start.kv_bytes < planned.nbytes < planned.start.kv_bytes + (32 << 20)
    with pytest.raises(UsageError):
        model.plan_memory(StageSetup(dtype="f32"), 100_000, 16, 64)


def test_its_memory_is_reserved_for_placement(make_model: Any, tmp_path: Path) -> None:
    model = find(make_model(tmp_path / "draft"))
    settings = load_settings(Home(tmp_path), {}, {"MOLINK_DTYPE": "f32"})
    measured = MeasuredDevice(Device(kind="cpu", name="x", memory=1 << 30), bf16=True)
    reported = model.reserve_memory(measured, settings).device
    setup = measured.stage_setup(settings.pipeline, "f32")
    planned = model.plan_memory(setup, 1 << 30, 16, model.folder.config.max_model_len)
    assert reported.draft_bytes == planned.nbytes > planned.start.kv_bytes
    offered = candidate_from_report("a", msgspec.structs.replace(report("a"), device=reported))
    assert offered is not None
    assert offered.draft_bytes == reported.draft_bytes
    small = MeasuredDevice(Device(kind="cpu", name="x", memory=100_000), bf16=True)
    assert model.reserve_memory(small, settings) is small


def test_a_folder_becomes_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
