"""What the PC that provides a model requests of the coordinator, and what it rejects first."""

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from molink.checkpoint import model_source
from molink.checkpoint import quantize_check as module
from molink.checkpoint.adapters import read_adapters
from molink.checkpoint.model_source import ModelSource
from molink.errors import BrokenModel, ModelNotFound, UsageError
from molink.wire.messages.admin import InviteReply, InviteRequest, ServeModel
from molink.wire.messages.control_plane import DoneReply
from molinkd.peer.artifacts import bootstrap as bootstrap_module
from molinkd.peer.artifacts.bootstrap import Bootstrap
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    Announce,
    AnyDaemonEvent,
    Launch,
    ModelFoundEvent,
    ProblemReportedEvent,
    StageStatusChangedEvent,
)
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.settings import Settings
from tests.support.adapters import write_adapter


class FakeSession:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def request(self, message: Any) -> Any:
        self.asked.append(message)
        return (
            InviteReply(ref=0, token="t")
            if isinstance(message, InviteRequest)
            else DoneReply(ref=0)
        )


@pytest.fixture(scope="module")
def model(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_model(tmp_path_factory.mktemp("founder"))
    return made


def founder(
    home: Path, model: Path | str, announce: Announce = lambda _: None, **settings: Any
) -> Bootstrap:
    place = Home(home).create_folders()
    launch = Launch(
        home=str(home),
        settings=Settings(name="n", **settings),
        role="up",
        model=str(model),
        token=None,
    )
    return Bootstrap(launch, place, place.load_keys(), ModelRepository(), announce)


async def test_the_request_has_the_user_s_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    given = {"quantize": "nf4", "kv_cache_dtype": "int8", "dtype": "f32"}
    made = founder(tmp_path, model, **given, min_peers=2, min_stages=3)
    await made.find_model()
    await made.hash_model()
    session: Any = FakeSession()
    await made.request_serving(session)
    order = session.asked[0]
    assert isinstance(order, ServeModel)
    assert (order.quantize, order.dtype, order.min_peers) == ("nf4", "f32", 2)
    assert order.kv_cache_dtype == "int8"
    assert (order.objective, order.min_stages) == ("latency", 3)
    assert order.model.root == ModelRepository().add_model("m", model).manifest.root
    assert len(session.asked) == 1, "an invitation is made when somebody asks for one"
    assert 0 < order.model.nf4_bytes < order.model.int8_bytes < order.model.projection_bytes


@pytest.mark.parametrize(("wanted", "found"), [(0, 512), (64, 64), (1000, 512)])
async def test_max_model_len_can_be_lowered(
    model: Path, tmp_path: Path, wanted: int, found: int
) -> None:
    made = founder(tmp_path, model, max_model_len=wanted)
    await made.find_model()
    assert made.facts is not None
    assert made.facts.max_model_len == found


async def test_unsupported_features_are_reported(model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model, tmp_path / "m")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    dual = {"chunk_size": 64, "original_max_position_embeddings": 64}
    text = json.dumps({**config, "dual_chunk_attention_config": dual})
    (model / "config.json").write_text(text, encoding="utf-8")
    said: list[Any] = []
    made = founder(tmp_path, model, announce=said.append)
    await made.find_model()
    assert made.facts is not None
    assert made.facts.max_model_len == 64
    assert any("the context is 64 tokens" in getattr(event, "text", "") for event in said)


async def test_a_truncated_cached_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = shutil.copytree(model, tmp_path / "cut")
    weights = next(cut.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    source = ModelSource("m", cut, "owner/m@commit")
    monkeypatch.setattr(model_source, "find_model", lambda *_, **__: source)
    made = founder(tmp_path / "home", "owner/m")
    with pytest.raises(BrokenModel, match=r"truncated; fetch it again. `molink pull owner/m"):
        await made.find_model()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokenizer.json", {"version": "1.0"}),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}),
    ],
)
async def test_an_invalid_tokenizer_is_rejected_early(
    model: Path, tmp_path: Path, name: str, fields: dict[str, str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / name).write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(BrokenModel, match=name.partition(".")[0]):
        await founder(tmp_path, folder).find_model()


async def test_without_bitsandbytes_nothing_is_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="molink setup"):
        await founder(tmp_path, model, quantize="nf4").find_model()
    # A PC without a stage of its own needs no packages for quantization.
    await founder(tmp_path, model, quantize="nf4", stage="none").find_model()


async def test_without_a_model_there_is_nothing_to_hash(tmp_path: Path, model: Path) -> None:
    made = founder(tmp_path, model)
    await made.hash_model()
    session: Any = FakeSession()
    await made.request_serving(session)
    assert session.asked == []


@pytest.mark.parametrize(("family", "sees"), [("mistral3", True), ("mistral", False)])
async def test_a_vision_model_is_reported(
    make_model: Any, tmp_path: Path, family: str, sees: bool
) -> None:
    reported: list[AnyDaemonEvent] = []
    await founder(
        tmp_path / "home", make_model(tmp_path / "model", family), reported.append
    ).find_model()
    (event,) = reported
    assert isinstance(event, ModelFoundEvent)
    assert event.is_text_only is sees


async def test_changed_files_are_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    reported: asyncio.Queue[AnyDaemonEvent] = asyncio.Queue()
    made = founder(tmp_path / "home", copy, announce=reported.put_nowait)
    await made.find_model()
    assert isinstance(await reported.get(), ModelFoundEvent)
    await made.hash_model()
    monkeypatch.setattr(bootstrap_module, "_CHECK_INTERVAL_S", 0.001)
    watching = asyncio.create_task(made.watch_files())
    (copy / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    said = await reported.get()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert isinstance(said, ProblemReportedEvent)
    assert "tokenizer_config.json has changed since molink read it" in said.text


async def test_hashing_progress_is_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: asyncio.Queue[AnyDaemonEvent] = asyncio.Queue()
    shown = threading.Event()
    made = founder(tmp_path, model, announce=reported.put_nowait)
    await made.find_model()
    await reported.get()
    hashed = ModelRepository.add_model

    def slow(*arguments: Any) -> Any:
        shown.wait(60)
        return hashed(*arguments)

    monkeypatch.setattr(ModelRepository, "add_model", slow)
    monkeypatch.setattr(bootstrap_module, "_PROGRESS_INTERVAL_S", 0.001)
    hashing = asyncio.create_task(made.hash_model())
    said = await reported.get()
    shown.set()
    await hashing
    assert isinstance(said, StageStatusChangedEvent)
    assert said.text.startswith("hashing the model's files, once: 0 of")


async def test_a_model_with_adapters(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", model)
    plain, adapted = (
        founder(tmp_path / name, model, adapters=adapters)
        for name, adapters in (("plain", {}), ("adapted", {"poet": str(adapter)}))
    )
    for bootstrap in (plain, adapted):
        await bootstrap.find_model()
        await bootstrap.hash_model()
    assert plain.facts is not None
    assert adapted.facts is not None
    assert plain.facts.name == adapted.facts.name
    assert plain.facts.root != adapted.facts.root
    assert adapted.facts.layer_bytes > plain.facts.layer_bytes
    files = adapted._library.get_model(adapted.name)
    assert files is not None
    assert "molink_adapters.json" in files.manifest.files
    assert "model.layers.0.mlp.up_proj.lora_B.1" in files.manifest.tensors


async def test_an_adapter_of_nothing_is_reported(model: Path, tmp_path: Path) -> None:
    bootstrap = founder(tmp_path / "home", model, adapters={"poet": str(tmp_path / "none")})
    with pytest.raises(ModelNotFound, match=r"adapter poet: .* is not a folder"):
        await bootstrap.find_model()


async def test_applied_adapters_are_served_after_a_restart(model: Path, tmp_path: Path) -> None:
    adapter = str(write_adapter(tmp_path / "adapter", model))
    bootstrap = founder(tmp_path / "home", model)
    record = MembershipRecord(
        swarm="s",
        coordinator_key="k",
        addresses=(),
        is_founder=True,
        model=str(model),
        adapters={str(model): {"poet": adapter}},
    )
    record.save(Home(tmp_path / "home").membership)
    for launched, names in ((None, ["poet"]), (str(model), [])):
        # A start that names the model again, without adapters, removes them.
        bootstrap._launch = structs.replace(bootstrap._launch, model=launched)
        bootstrap._adapters = {}
        await bootstrap.find_model()
        assert bootstrap.path is not None
        assert [one.name for one in read_adapters(bootstrap.path)] == names
