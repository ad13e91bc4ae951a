"""What the PC that brings a model asks of the coordinator, and what it refuses before."""

from pathlib import Path
from typing import Any

import pytest

from molink.errors import UsageError
from molink.wire.messages.control import Done, Invite, InviteRequest, ServeModel
from molinkd.peer import quantize as module
from molinkd.peer.founder import Founder
from molinkd.peer.home import Home
from molinkd.peer.launch import Launch
from molinkd.peer.library import Library
from molinkd.peer.settings import Settings


class FakeSession:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def request(self, message: Any) -> Any:
        self.asked.append(message)
        return Invite(ref=0, token="t") if isinstance(message, InviteRequest) else Done(ref=0)


@pytest.fixture(scope="module")
def model(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_model(tmp_path_factory.mktemp("founder"))
    return made


def founder(home: Path, model: Path, **settings: Any) -> Founder:
    place = Home(home).create()
    launch = Launch(
        home=str(home),
        settings=Settings(name="n", **settings),
        role="up",
        model=str(model),
        token=None,
    )
    return Founder(launch, place, place.keys(), Library(), lambda _: None)


async def test_it_asks_for_the_model_as_the_user_wants_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    made = founder(tmp_path, model, quantize="nf4", dtype="f32", min_peers=2)
    await made.find_model()
    session: Any = FakeSession()
    await made.serve(session)
    order = session.asked[0]
    assert isinstance(order, ServeModel)
    assert (order.quantize, order.dtype, order.min_peers) == ("nf4", "f32", 2)
    assert 0 < order.model.nf4_bytes < order.model.int8_bytes < order.model.projection_bytes


async def test_without_bitsandbytes_nothing_is_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install bitsandbytes"):
        await founder(tmp_path, model, quantize="nf4").find_model()
    # A PC without a stage of its own need not have it.
    await founder(tmp_path, model, quantize="nf4", stage="none").find_model()
