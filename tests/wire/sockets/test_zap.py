import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from molink.errors import UsageError
from molink.facts.identity import derive_peer_id
from molink.util.token_bucket import KeyedTokenBuckets, RateLimit
from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import DoneReply
from molink.wire.sockets import zap
from molink.wire.sockets.create_socket import DOMAIN
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server
from molink.wire.sockets.zap import RefusedHandshake, ZapAuthenticator


@pytest.fixture
async def echo(net: Any) -> Server[Any]:
    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        server.send(sender.identity, DoneReply(ref=message.ref))

    server: Server[Any] = net.server(control_codec(), handle)
    return server


def test_peers_are_allowed_and_denied() -> None:
    with zmq.Context() as context:
        authenticator = ZapAuthenticator(context)
        one, two = KeyPair.generate().public, KeyPair.generate().public
        assert authenticator.allow_peer(one) == derive_peer_id(one)
        assert authenticator.allow_peer(two, "invite:x") == "invite:x"
        assert authenticator.peers == {derive_peer_id(one), "invite:x"}
        authenticator.block_peer("invite:x")
        assert not authenticator.is_allowed("invite:x")
        authenticator.allow_peer(two, "invite:x")
        assert not authenticator.is_allowed("invite:x")
        authenticator.deny_peer("invite:x")
        assert authenticator.blocked == frozenset()
        authenticator.allow_peer(two, "invite:x")
        assert authenticator.is_allowed("invite:x")
        authenticator.deny_peer("nobody")
        authenticator.close()


async def test_one_handler_per_context(net: Any) -> None:
    with zmq.Context() as context:
        one, two = ZapAuthenticator(context), ZapAuthenticator(context)
        one.start()
        one.start()
        with pytest.raises(UsageError, match="already"):
            two.start()
        one.close()
        one.close()

        def started() -> bool:
            with contextlib.suppress(UsageError):
                two.start()
                return True
            return False

        # libzmq closes a socket, and frees its address, some time later.
        await net.until(started)
        two.close()


async def test_failing_callback_does_not_lock_out_peers(
    net: Any, echo: Server[Any], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[RefusedHandshake] = []

    def fail(refusal: RefusedHandshake) -> None:
        told.append(refusal)
        raise ValueError("no")

    net.authenticator._on_refused = fail
    net.client(control_codec(), KeyPair.generate(), echo.port)
    await net.until(lambda: net.authenticator.refused)
    await net.client(control_codec(), net.member(), echo.port).send_request(StatusRequest(ref=0))
    assert told[0].address == "127.0.0.1"
    assert "authenticating a handshake failed" in caplog.records[0].message
    assert not any("restarting it" in record.message for record in caplog.records)


async def test_failed_handler_is_restarted(
    net: Any, echo: Server[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer, failures = net.authenticator._answer, []

    def fail_first(frames: list[bytes]) -> Any:
        if not failures:
            failures.append(1)
            raise ValueError("no")
        return answer(frames)

    monkeypatch.setattr(net.authenticator, "_answer", fail_first)
    client = net.client(control_codec(), net.member(), echo.port)
    await client.send_request(StatusRequest(ref=0), timeout=60)
    assert sum("restarting it" in record.message for record in caplog.records) == 1


async def test_no_connection_without_an_authenticator(net: Any, echo: Server[Any]) -> None:
    net.authenticator.close()
    client = net.client(control_codec(), net.member(), echo.port)
    await net.until(lambda: client.failure is not None)
    assert not client.is_connected


async def test_other_domains_and_mechanisms_are_refused(net: Any, echo: Server[Any]) -> None:
    header = [b"i", b"", b"1.0", b"1"]
    key = bytes(32)
    for rest in (
        [b"*", b"127.0.0.1", b"", b"CURVE", key],
        [b"molink", b"127.0.0.1", b"", b"NULL"],
        [b"molink", b"127.0.0.1", b"", b"PLAIN", b"user", b"password"],
        [b"molink", b"127.0.0.1", b"", b"CURVE", b"short"],
        [b"molink", b"127.0.0.1", b"", b"CURVE", key],
    ):
        reply = net.authenticator._answer([*header, *rest])
        assert reply[:5] == [*header, b"400"]


async def test_frequent_handshakes_are_deferred(net: Any, echo: Server[Any]) -> None:
    net.authenticator._handshake_buckets = KeyedTokenBuckets(RateLimit(2, 2.0))
    keys = net.member("often")
    clients = [net.client(control_codec(), keys, echo.port) for _ in range(3)]
    await net.until(lambda: net.authenticator.deferred)
    await net.client(control_codec(), net.member(), echo.port).send_request(StatusRequest(ref=0))
    for client in clients:
        await client.send_request(StatusRequest(ref=0), timeout=30)
    assert net.authenticator.refused == 0


def test_many_peers_of_one_address_are_admitted_beside_a_flood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zap, "time", SimpleNamespace(monotonic=lambda: 0.0))
    keys = [KeyPair.generate() for _ in range(64)]
    stranger = KeyPair.generate()
    with zmq.Context() as context:
        authenticator = ZapAuthenticator(context)
        for one in keys:
            authenticator.allow_peer(one.public)

        def answer(key: KeyPair) -> bytes:
            request = [b"1.0", b"1", DOMAIN.encode(), b"127.0.0.1", b"", b"CURVE"]
            return authenticator._answer([b"", b"", *request, z85.decode(key.public)])[4]

        flood = [answer(keys[0]) for _ in range(500)]
        assert [flood.count(status) for status in (b"200", b"300")] == [100, 400]
        assert {answer(stranger) for _ in range(500)} == {b"400"}
        assert {answer(one) for one in keys[1:] for _ in range(5)} == {b"200"}
