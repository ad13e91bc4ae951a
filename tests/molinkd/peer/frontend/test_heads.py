"""Connections to heads over real sockets, and the models that a peer can offer."""

import json
from pathlib import Path

import msgspec
import pytest

from molink.errors import Unavailable
from molink.facts.identity import peer_id
from molink.swarm.frontend.stream import HeadEpoch
from molink.wire.messages.codec import data_codec
from molink.wire.messages.instructions import Route, StageAddress
from molink.wire.messages.serving import Cancel, Token, Tokens
from molink.wire.sockets.server import Sender
from molinkd.peer.frontend import served as served_module
from molinkd.peer.frontend.heads import Heads
from molinkd.peer.frontend.served import ServedModels
from tests.support.net import Net


def route(net: Net, port: int, epoch: int = 1, *, ready: bool = True) -> Route:
    head = StageAddress(
        peer=peer_id(net.keys.public),
        public_key=net.keys.public,
        addresses=("127.0.0.1",),
        port=port,
    )
    return Route(
        pipeline="p1",
        epoch=epoch,
        model="m",
        ready=ready,
        head=head if ready else None,
        context=128,
    )


async def test_a_head_is_usable_once_it_is_connected(net: Net) -> None:
    got, changes, said = [], [], []

    def handle(sender: Sender, message: Cancel, _payload: memoryview | None) -> None:
        got.append(message)
        server.send(sender.identity, Tokens((Token(1, "k", 0, 7),)))

    server = net.server(data_codec(), handle)
    heads = Heads(net.context, net.member(), changes.append, lambda *what: said.append(what))
    heads.update(route(net, server.port))
    assert heads.targets("m") == []
    await net.until(lambda: heads.targets("m") == [HeadEpoch("p1", 1)])
    assert heads.targets("other") == []
    heads.send(HeadEpoch("p1", 1), Cancel("k"))
    await net.until(lambda: said)
    assert got == [Cancel("k")]
    assert said[0][0] == "p1"
    # Another epoch of the same head goes over the same connection.
    heads.update(route(net, server.port, 2))
    assert heads.targets("m") == [HeadEpoch("p1", 2)]
    with pytest.raises(Unavailable):
        heads.send(HeadEpoch("p1", 1), Cancel("k"))
    heads.update(route(net, server.port, 1))
    assert heads.targets("m") == [HeadEpoch("p1", 2)]
    heads.update(route(net, 0, 3, ready=False))
    assert heads.targets("m") == []
    heads.remove("p1")
    heads.remove("p1")
    assert heads.routes == ()
    assert set(changes) == {"m"}
    await heads.close()


async def test_a_session_tells_what_has_ended_while_there_was_none(net: Net) -> None:
    heads = Heads(net.context, net.member(), lambda _: None, lambda *_: None)
    heads.update(route(net, 0, 9))
    heads.update(msgspec.structs.replace(route(net, 0, 3), pipeline="p2"))
    heads.welcomed()
    # Another coordinator's word on a pipeline holds, even if its epoch is older.
    assert heads.update(route(net, 0, 8, ready=False)) == []
    assert [(known.pipeline, known.epoch) for known in heads.routes] == [("p1", 8), ("p2", 3)]
    assert heads.update(route(net, 0, 8)) == ["p2"]
    assert [(known.pipeline, known.epoch) for known in heads.routes] == [("p1", 8)]
    assert heads.update(route(net, 0, 7)) == []
    assert heads.routes[0].epoch == 8
    await heads.close()


async def test_what_goes_on_beside_has_not_ended(net: Net) -> None:
    """A model may have several pipelines, and there may be other models."""
    heads = Heads(net.context, net.member(), lambda _: None, lambda *_: None)
    for pipeline in ("p1", "p2", "p3"):
        heads.update(msgspec.structs.replace(route(net, 0, 3), pipeline=pipeline))
    heads.update(msgspec.structs.replace(route(net, 0, 4), pipeline="p4", model="other"))
    heads.welcomed()
    again = msgspec.structs.replace(route(net, 0, 3), beside=("p2",))
    assert heads.update(again) == ["p3"]
    assert [known.pipeline for known in heads.routes] == ["p1", "p2", "p4"]
    await heads.close()


async def test_a_broken_connection_is_a_change(net: Net) -> None:
    server = net.server(data_codec(), lambda *_: None)
    heads = Heads(net.context, net.member(), lambda _: None, lambda *_: None)
    heads.update(route(net, server.port))
    await net.until(lambda: heads.targets("m"))
    await server.close()
    await net.until(lambda: not heads.targets("m"))
    with pytest.raises(Unavailable):
        heads.send(HeadEpoch("p1", 1), Cancel("k"))
    await heads.close()


async def test_a_head_that_is_reached_by_another_way_from_now_on(net: Net) -> None:
    server = net.server(data_codec(), lambda *_: None)
    port = 1  # where nobody is

    def via(address: StageAddress) -> StageAddress:
        return msgspec.structs.replace(address, port=port)

    heads = Heads(net.context, net.member(), lambda _: None, lambda *_: None, via)
    told = route(net, 2)
    heads.update(told)
    assert told.head is not None
    port = server.port
    heads.moved("another")
    heads.moved(told.head.peer)
    await net.until(lambda: heads.targets("m"))
    assert heads.routes == (told,)
    await heads.close()


async def test_a_false_head_is_not_dialled(net: Net) -> None:
    server = net.server(data_codec(), lambda *_: None)
    heads = Heads(net.context, net.member(), lambda _: None, lambda *_: None)
    right = route(net, server.port)
    assert right.head is not None
    false = msgspec.structs.replace(right.head, peer="0" * 16)
    heads.update(msgspec.structs.replace(right, head=false))
    assert heads.targets("m") == []
    await heads.close()


class FakeStore:
    """A store that fails at first."""

    def __init__(self, folder: Path, failures: int) -> None:
        self.folder = folder
        self.failures = failures

    async def metadata(self, model: str, root: str, sources: object, *, paced: bool) -> Path:
        self.failures -= 1
        if self.failures >= 0:
            raise Unavailable("not yet")
        return self.folder


async def test_a_model_is_offered_once_its_tokenizer_is_here(
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
    served.update(route(net, 1))
    served.update(route(net, 1, 2))
    await net.until(lambda: offers == [["m"]])
    served.remove("other")
    served.remove("p1")
    assert offers == [["m"], []]
    served.update(route(net, 1, 3))
    await served.close()


async def test_a_model_that_cannot_be_loaded_is_given_up_aloud(net: Net, tmp_path: Path) -> None:
    class Broken(FakeStore):
        async def metadata(self, *_: object, paced: bool) -> Path:
            raise RecursionError("too deep")

    troubles: list[str] = []
    served = ServedModels(Broken(tmp_path, 0), lambda models: None, troubles.append)
    served.update(route(net, 1))
    await net.until(lambda: troubles)
    assert troubles == ["m can't be offered here: RecursionError: too deep"]
    await served.close()
