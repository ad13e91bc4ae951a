"""Connections to schedulers over real sockets, and the offered models."""

import json
from pathlib import Path

import msgspec
import pytest

from molink.errors import Unavailable
from molink.facts.identity import derive_peer_id
from molink.swarm.frontend.stream import PipelineEpoch
from molink.wire.messages.codec import data_codec
from molink.wire.messages.instructions import Route, StageAddress
from molink.wire.messages.serving import Cancel, OutputToken, OutputTokens
from molink.wire.sockets.server import MessageSender
from molinkd.peer.frontend import served_models as served_module
from molinkd.peer.frontend.scheduler_connections import SchedulerConnections
from molinkd.peer.frontend.served_models import ServedModels
from tests.support.net import Net


def route(net: Net, port: int, epoch: int = 1, *, ready: bool = True) -> Route:
    scheduler = StageAddress(
        peer=derive_peer_id(net.keys.public),
        public_key=net.keys.public,
        addresses=("127.0.0.1",),
        port=port,
    )
    return Route(
        pipeline="p1",
        epoch=epoch,
        model="m",
        is_ready=ready,
        scheduler=scheduler if ready else None,
        max_model_len=128,
    )


async def test_a_scheduler_is_usable_once_connected(net: Net) -> None:
    got, changes, said = [], [], []

    def handle(sender: MessageSender, message: Cancel, _payload: memoryview | None) -> None:
        got.append(message)
        server.send(sender.identity, OutputTokens((OutputToken(1, "k", 0, 7),)))

    server = net.server(data_codec(), handle)
    schedulers = SchedulerConnections(
        net.context, net.member(), changes.append, lambda *what: said.append(what)
    )
    schedulers.update_route(route(net, server.port))
    assert schedulers.ready_targets("m") == []
    await net.until(lambda: schedulers.ready_targets("m") == [PipelineEpoch("p1", 1)])
    assert schedulers.ready_targets("other") == []
    schedulers.send(PipelineEpoch("p1", 1), Cancel("k"))
    await net.until(lambda: said)
    assert got == [Cancel("k")]
    assert said[0][0] == "p1"
    # Another epoch of the same scheduler uses the same connection.
    schedulers.update_route(route(net, server.port, 2))
    assert schedulers.ready_targets("m") == [PipelineEpoch("p1", 2)]
    with pytest.raises(Unavailable):
        schedulers.send(PipelineEpoch("p1", 1), Cancel("k"))
    schedulers.update_route(route(net, server.port, 1))
    assert schedulers.ready_targets("m") == [PipelineEpoch("p1", 2)]
    schedulers.update_route(route(net, 0, 3, ready=False))
    assert schedulers.ready_targets("m") == []
    schedulers.remove_pipeline("p1")
    schedulers.remove_pipeline("p1")
    assert schedulers.routes == ()
    assert set(changes) == {"m"}
    await schedulers.close()


async def test_a_new_session_reveals_ended_pipelines(net: Net) -> None:
    schedulers = SchedulerConnections(net.context, net.member(), lambda _: None, lambda *_: None)
    schedulers.update_route(route(net, 0, 9))
    schedulers.update_route(msgspec.structs.replace(route(net, 0, 3), pipeline="p2"))
    schedulers.on_welcome()
    # A new coordinator's route replaces a known one, even if its epoch is older.
    assert schedulers.update_route(route(net, 0, 8, ready=False)) == []
    assert [(known.pipeline, known.epoch) for known in schedulers.routes] == [("p1", 8), ("p2", 3)]
    assert schedulers.update_route(route(net, 0, 8)) == ["p2"]
    assert [(known.pipeline, known.epoch) for known in schedulers.routes] == [("p1", 8)]
    assert schedulers.update_route(route(net, 0, 7)) == []
    assert schedulers.routes[0].epoch == 8
    await schedulers.close()


async def test_sibling_pipelines_have_not_ended(net: Net) -> None:
    """Routes name the sibling pipelines of their model; other models' pipelines are unaffected."""
    schedulers = SchedulerConnections(net.context, net.member(), lambda _: None, lambda *_: None)
    for pipeline in ("p1", "p2", "p3"):
        schedulers.update_route(msgspec.structs.replace(route(net, 0, 3), pipeline=pipeline))
    schedulers.update_route(msgspec.structs.replace(route(net, 0, 4), pipeline="p4", model="other"))
    schedulers.on_welcome()
    again = msgspec.structs.replace(route(net, 0, 3), sibling_pipelines=("p2",))
    assert schedulers.update_route(again) == ["p3"]
    assert [known.pipeline for known in schedulers.routes] == ["p1", "p2", "p4"]
    await schedulers.close()


async def test_a_broken_connection_is_a_change(net: Net) -> None:
    server = net.server(data_codec(), lambda *_: None)
    schedulers = SchedulerConnections(net.context, net.member(), lambda _: None, lambda *_: None)
    schedulers.update_route(route(net, server.port))
    await net.until(lambda: schedulers.ready_targets("m"))
    await server.close()
    await net.until(lambda: not schedulers.ready_targets("m"))
    with pytest.raises(Unavailable):
        schedulers.send(PipelineEpoch("p1", 1), Cancel("k"))
    await schedulers.close()


async def test_a_scheduler_with_a_new_route_is_reconnected(net: Net) -> None:
    server = net.server(data_codec(), lambda *_: None)
    port = 1  # no process listens here

    def via(address: StageAddress) -> StageAddress:
        return msgspec.structs.replace(address, port=port)

    schedulers = SchedulerConnections(
        net.context, net.member(), lambda _: None, lambda *_: None, via
    )
    reported = route(net, 2)
    schedulers.update_route(reported)
    assert reported.scheduler is not None
    port = server.port
    schedulers.reconnect_peer("another")
    schedulers.reconnect_peer(reported.scheduler.peer)
    await net.until(lambda: schedulers.ready_targets("m"))
    assert schedulers.routes == (reported,)
    await schedulers.close()


async def test_a_scheduler_with_a_mismatched_id_is_not_dialled(net: Net) -> None:
    server = net.server(data_codec(), lambda *_: None)
    schedulers = SchedulerConnections(net.context, net.member(), lambda _: None, lambda *_: None)
    right = route(net, server.port)
    assert right.scheduler is not None
    false = msgspec.structs.replace(right.scheduler, peer="0" * 16)
    schedulers.update_route(msgspec.structs.replace(right, scheduler=false))
    assert schedulers.ready_targets("m") == []
    await schedulers.close()


class FakeStore:
    """A store that fails at first."""

    def __init__(self, folder: Path, failures: int) -> None:
        self.folder = folder
        self.failures = failures

    async def fetch_metadata(
        self, model: str, root: str, sources: object, *, rate_limited: bool
    ) -> Path:
        self.failures -= 1
        if self.failures >= 0:
            raise Unavailable("not yet")
        return self.folder


async def test_a_model_is_offered_once_its_tokenizer_is_fetched(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_module, "BACK_OFF_S", (0.01,))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    offers: list[list[str]] = []
    served = ServedModels(
        FakeStore(tmp_path, 3),
        lambda models: offers.append([m.name for m in models]),
        lambda text: None,
    )
    served.update_route(route(net, 1))
    served.update_route(route(net, 1, 2))
    await net.until(lambda: offers == [["m"]])
    served.remove_pipeline("other")
    served.remove_pipeline("p1")
    assert offers == [["m"], []]
    served.update_route(route(net, 1, 3))
    await served.close()


async def test_a_model_that_cannot_be_loaded_is_reported(net: Net, tmp_path: Path) -> None:
    class Broken(FakeStore):
        async def fetch_metadata(self, *_: object, rate_limited: bool) -> Path:
            raise RecursionError("too deep")

    problems: list[str] = []
    served = ServedModels(Broken(tmp_path, 0), lambda models: None, problems.append)
    served.update_route(route(net, 1))
    await net.until(lambda: problems)
    assert problems == ["can't offer m: RecursionError: too deep"]
    await served.close()
