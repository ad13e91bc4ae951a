"""What the owner does over the endpoint, with a fake hub."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.checkpoint import hub
from molink.checkpoint.model_names import find_demo_folder
from molink.errors import ModelNotFound, Overloaded, RequestError
from molink.wire.messages.admin import (
    LoadModelReply,
    PairingDecisionReply,
    PairingDecisionRequest,
    SwitchModel,
)
from molink.wire.messages.control_plane import ControlMessage, DoneReply
from molinkd.peer.control_service import UserCommands
from molinkd.peer.frontend import local_administration
from molinkd.peer.frontend.local_administration import MAX_PULLS, LocalAdministration
from molinkd.peer.home import Home
from molinkd.peer.settings import read_options, write_options
from tests.support.fake_hub import REPOSITORY, FakeHub, in_place


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "RETRY_DELAYS_S", (0.0,))
    with in_place(find_demo_folder(), tmp_path / "cache", monkeypatch) as made:
        yield made


@dataclass
class Swarm:
    """The daemon's side, scripted and recorded."""

    status: dict[str, object] = field(default_factory=dict)
    asked: list[object] = field(default_factory=list)
    replies: list[LoadModelReply] = field(default_factory=list)

    @property
    def commands(self) -> UserCommands:
        async def query_status(_: bool) -> bytes:
            return msgspec.json.encode(self.status)

        async def forward(message: ControlMessage) -> tuple[ControlMessage, bytes]:
            self.asked.append(message)
            if isinstance(message, PairingDecisionRequest):
                return PairingDecisionReply(ref=0, name="lap"), b""
            return DoneReply(ref=0), b""

        async def load_model(model: str) -> LoadModelReply:
            self.asked.append(model)
            return self.replies.pop(0)

        def set_drained(drain: bool, device: str) -> None:
            self.asked.append((drain, device))

        async def unused(_: object) -> Any:
            raise AssertionError

        return UserCommands(query_status, forward, unused, set_drained, load_model, unused)


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


@pytest.fixture
async def owner(tmp_path: Path, swarm: Swarm) -> LocalAdministration:
    loop = asyncio.get_running_loop()
    return LocalAdministration(Home(tmp_path / "home"), "me", "none", swarm.commands, loop)


async def test_clients_share_a_download(owner: LocalAdministration, served: FakeHub) -> None:
    async def pull(model: str = REPOSITORY) -> int:
        return len([one async for one in owner.pull_model(model)])

    assert min(await asyncio.gather(pull(), pull())) >= 1
    assert hub.find_cached(REPOSITORY) is not None
    assert max(served.sent.values()) == sum(
        path.stat().st_size for path in served.folder.glob("*.safetensors")
    )
    with pytest.raises(ModelNotFound, match="no model"):
        await pull("no-such-model")


async def test_a_download_ends_with_its_last_client(
    owner: LocalAdministration, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def fetch(_model: str, _home: Home, _progress: object, stop: threading.Event) -> None:
        begun.set()
        stop.wait(60)
        stopped.set()

    monkeypatch.setattr(local_administration, "fetch_whole_model", fetch)
    async with aclosing(owner.pull_model("owner/a")) as first:
        await anext(first)
        assert await asyncio.to_thread(begun.wait, 60)
        async with aclosing(owner.pull_model("owner/a")) as second:
            await anext(second)
        others = [owner.pull_model(f"owner/b{number}") for number in range(1, MAX_PULLS)]
        for one in others:
            await anext(one)
        with pytest.raises(Overloaded):
            await anext(owner.pull_model("owner/c"))
        for one in others:
            await one.aclose()
    assert await asyncio.to_thread(stopped.wait, 60)
    async with aclosing(owner.pull_model("owner/c")) as last:
        await anext(last)


async def test_serving_follows_the_daemon(
    owner: LocalAdministration, swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_administration, "POLL_INTERVAL_S", 0.0)
    swarm.replies = [
        LoadModelReply(ref=0, state="fetching", name="", done=3, total=9),
        LoadModelReply(ref=0, state="asked", name="molink-demo"),
    ]
    found = [one async for one in owner.serve_model("molink-demo")]
    assert [(one.state, one.done, one.total) for one in found] == [
        ("fetching", 3, 9),
        ("asked", 0, 0),
    ]
    assert swarm.asked == ["molink-demo", "molink-demo"]


async def test_a_stopped_model_is_resumed(owner: LocalAdministration, swarm: Swarm) -> None:
    swarm.status = {"models": [{"name": "molink-demo", "stopped": True}]}
    found = [one async for one in owner.serve_model("molink-demo")]
    assert [(one.state, one.name) for one in found] == [("asked", "molink-demo")]
    assert swarm.asked == [SwitchModel(ref=0, model="molink-demo", served=True)]


async def test_a_model_that_does_not_fit_is_not_loaded(
    owner: LocalAdministration, swarm: Swarm
) -> None:
    small = {"kind": "cuda", "name": "Card", "memory": 10**9}
    swarm.status = {"peers": [{"id": "a", "state": "online", "stage": "auto", "capacity": small}]}
    with pytest.raises(RequestError, match="Nothing was downloaded"):
        await anext(owner.serve_model("llama3.3:70b"))
    assert swarm.asked == []


async def test_other_actions(owner: LocalAdministration, swarm: Swarm) -> None:
    assert await owner.decide_pairing("4827-1931", refuse=True) == "lap"
    await owner.stop_model("m")
    await owner.set_drained(True)
    asked = PairingDecisionRequest(ref=0, code="4827-1931", refuse=True)
    assert swarm.asked == [asked, SwitchModel(ref=0, model="m"), (True, "")]
    names = [one.name for one in await owner.list_local_models()]
    assert "molink-demo" in names


async def test_settings_are_saved_for_the_next_start(
    owner: LocalAdministration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_config_path", lambda *_: tmp_path / "config")
    home = Home(tmp_path / "home").create_folders()
    write_options(home.options, {"stage": "none"})
    await owner.change_setting("pause_times", "18:00-23:30, 12:00-13:00")
    await owner.change_setting("keep_awake", "false")
    assert read_options(home.options) == {
        "stage": "none",
        "pause_times": ["18:00-23:30", "12:00-13:00"],
        "keep_awake": False,
    }
    found = {one.name: one for one in await owner.list_settings()}
    assert found["pause_times"].value == "18:00-23:30, 12:00-13:00"
    assert found["keep_awake"].source == "the options of the last start"
    assert (found["standby_worker"].value, found["standby_worker"].source) == ("true", "")
    await owner.change_setting("pause_times", "")
    for name, value in (
        ("pause_times", "noon"),
        ("pause_when_busy", "perhaps"),
        ("api_host", "0.0.0.0"),
        ("api_key", "x"),
        ("draft_model", "/x"),
    ):
        with pytest.raises(RequestError):
            await owner.change_setting(name, value)
    assert read_options(home.options) == {"stage": "none", "keep_awake": False}


async def test_settings_changed_at_once_are_all_saved(
    owner: LocalAdministration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_config_path", lambda *_: tmp_path / "config")
    home = Home(tmp_path / "home").create_folders()
    write_options(home.options, {})
    names = ("keep_awake", "replicate_models", "standby_worker")
    for value in ("true", "false") * 4:
        await asyncio.gather(*(owner.change_setting(name, value) for name in names))
        assert read_options(home.options) == dict.fromkeys(names, value == "true")
