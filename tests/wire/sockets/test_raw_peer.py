"""Attacks that libzmq's own sockets can't perform, on a separate process."""

import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.peer_reports import Goodbye
from molink.wire.sockets.key_pair import KeyPair
from tests.support.connection_counters import counted
from tests.support.curve import COMMAND, GREETING, MORE, RawClient, RawServer, Refused, Wire, frame

ROOT = Path(__file__).resolve().parents[3]
MB = 1 << 20
#: Bytes of memory that an attack may cost: what a sender on the same PC can send until it is cut.
BOUND = 100 * MB


class Target:
    """A process with a server or a client, and the keys of a peer."""

    def __init__(self, *role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.attack_target", *role],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.told = json.loads(self.process.stdout.readline())
        self._before = self.rss
        self._wires = ExitStack()

    def close(self) -> None:
        self._wires.close()
        with self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()
            assert self.process.wait(20) == 0

    @property
    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def grown(self) -> int:
        return self.rss - self._before

    def dial(self, who: str = "hostile") -> RawClient:
        wire = RawClient(self.told["port"], *self.told[who], self.told["server"])
        return self._wires.enter_context(wire)

    def serves(self) -> None:
        """Assert that a well-behaved peer is answered on its own connection.

        It may first be cut because of others at its address; then it redials.
        """
        for left in (2, 1, 0):
            assert self.process.poll() is None
            try:
                with self.dial("honest").handshake() as wire:
                    assert wire.send(wire.message(*control_codec().encode(StatusRequest(ref=7))))
                    assert control_codec().decode(wire.receive())[0] == DoneReply(ref=7)
                return
            except Refused:
                if not left:
                    raise


@contextmanager
def running(*role: str) -> Iterator[Target]:
    target = Target(*role)
    try:
        yield target
    finally:
        target.close()


@pytest.fixture
def server() -> Iterator[Target]:
    with running("server") as target:
        target.serves()
        yield target
        target.serves()


#: A message that a peer may send without limit.
HARMLESS = control_codec().encode(StatusRequest(ref=7))


def test_a_ping_behind_a_full_pipe_and_a_reset(server: Target) -> None:
    """libzmq 4.3.5 asserts that no I/O error is pending when it answers a PING, but one may be."""
    for _ in range(40):
        with server.dial().handshake() as wire:
            filling = b"".join(wire.message(*HARMLESS) for _ in range(80))
            pings = b"".join(wire.ping() + wire.message(*HARMLESS) for _ in range(80))
            wire.send(filling + pings)
            wire.reset()
        assert server.process.poll() is None


def test_a_reset_while_nobody_reads(server: Target) -> None:
    """As after a suspend: the pipe is full, and a timer finds that the connection is broken."""
    hang = control_codec().encode(Goodbye(ref=1))
    with server.dial().handshake() as wire:
        wire.send(wire.message(*hang))
        wire.send(b"".join(wire.message(*HARMLESS) for _ in range(500)))
        wire.reset()
    server.serves()


def endless(wire: Wire, size: int, total: int) -> int:
    """Send up to ``total`` bytes in parts of one message; returns the bytes sent before the cut."""
    many = max(1, 100_000 // (size + 40))
    sent = 0
    while sent < total:
        chunk = b"".join(wire.part(bytes(size), MORE) for _ in range(many))
        if not wire.send(chunk):
            break
        sent += len(chunk)
    return sent


@counted
@pytest.mark.parametrize("size", [0, 34, 5_000, 250_000])
def test_endless_message_is_bounded(server: Target, size: int) -> None:
    # Fast processors send more before the cut, but the memory for it is bounded.
    most = 64 * MB if size >= 1000 else 24 * MB
    worst = 0
    for _ in range(3):
        with server.dial().handshake() as wire:
            assert endless(wire, size, most) < most
            worst = max(worst, server.grown)
        server.serves()
    assert worst < BOUND


@counted
def test_endless_messages_on_many_connections_are_bounded(server: Target) -> None:
    wires = [server.dial().handshake() for _ in range(40)]
    part = bytes(250_000)
    for _ in range(8):
        for wire in wires:
            wire.send(wire.part(part, MORE))
        assert server.grown < BOUND
    server.serves()
    for wire in wires:
        wire.close()


def test_endless_connections_are_bounded(server: Target) -> None:
    """A peer may open many connections, but not exhaust the process."""
    wires: list[RawClient] = []
    for _ in range(200):
        with suppress(Refused, OSError):
            wires.append(server.dial().handshake())
    process = psutil.Process(server.process.pid)

    def are_fewer() -> bool:
        for wire in wires:
            wire.send(wire.message(*HARMLESS))  # on Windows a silent connection stays
        return len(process.net_connections()) < 80

    wait_for(are_fewer)
    server.serves()
    for wire in wires:
        wire.close()


def test_fast_messages_are_bounded(server: Target) -> None:
    with server.dial().handshake() as wire:
        data = b"".join(wire.message(*HARMLESS) for _ in range(20_000))
        wire.send(data)
        server.serves()
        assert server.grown < BOUND


@pytest.mark.parametrize("kind", [b"ROUTER", b"PUB", b"XSUB", b"", b"X" * 200])
def test_other_socket_types_are_rejected(server: Target, kind: bytes) -> None:
    with suppress(Refused):
        server.dial().handshake(kind).close()
    server.serves()


def test_invalid_zmtp_commands_are_rejected(server: Target) -> None:
    def attack(data: Callable[[RawClient], bytes]) -> None:
        with server.dial().handshake() as wire:
            wire.send(data(wire))
            wire.send(wire.message(*HARMLESS))

    attack(lambda wire: wire.part(b"", COMMAND))
    attack(lambda wire: wire.part(b"\x09SUBSCRIBE", COMMAND))
    attack(lambda wire: wire.part(b"\x06CANCELx", COMMAND | MORE))
    attack(lambda wire: wire.part(b"\xffPING", COMMAND))
    attack(lambda wire: wire.part(b"\x04PING", COMMAND))
    attack(lambda wire: wire.ping(1))
    attack(lambda wire: wire.part(b"\x04PONG" + bytes(300), COMMAND | MORE))
    attack(lambda wire: wire.part(b"x", 0xFC))
    attack(lambda wire: frame(b"\x07MESSAGE" + bytes(8)))
    attack(lambda wire: frame(b"\x07MESSAGE" + bytes(60)))
    attack(lambda wire: frame(b""))
    attack(lambda wire: frame(b"", 4))
    attack(lambda wire: frame(b"\x05ERROR\xff", 4))
    attack(lambda wire: wire.initiate_bytes)
    attack(lambda wire: wire.part(b"twice") * 2)
    attack(lambda wire: b"\x02" + struct.pack(">Q", 1 << 62))
    attack(lambda wire: os.urandom(4000))
    server.serves()


def test_invalid_handshakes_are_rejected(server: Target) -> None:
    def half(steps: Callable[[RawClient], object]) -> RawClient:
        wire = server.dial()
        with suppress(Refused, OSError):
            steps(wire)
        return wire

    def replayed(wire: RawClient) -> None:
        """The last step of another connection's handshake."""
        with server.dial().handshake() as other:
            wire.greet()
            wire.hello()
            wire.socket.sendall(other.initiate_bytes)
            wire.ready()

    def twice(wire: RawClient) -> None:
        wire.greet()
        wire.hello()
        wire.socket.sendall(wire.hello_bytes())
        wire.frame()

    def long(wire: RawClient) -> None:
        wire.greet()
        wire.hello()
        wire.initiate(identity=bytes(100_000))
        wire.ready()

    def slow(wire: RawClient) -> None:
        """Sends one byte at a time."""
        for byte in GREETING[:20]:
            wire.socket.sendall(bytes([byte]))
            server.serves()

    def large(wire: RawClient) -> None:
        wire.greet()
        wire.socket.sendall(b"\x06" + struct.pack(">Q", 1 << 20) + bytes(1 << 20))

    wires = [half(steps) for steps in (RawClient.greet, replayed, twice, long, slow, large)]
    wires += [half(RawClient.greet) for _ in range(30)]
    wires += [half(large) for _ in range(30)]
    server.serves()
    assert server.grown < BOUND
    for wire in wires:
        wire.close()


@counted
def test_endless_message_of_a_server_is_bounded() -> None:
    """A client must withstand the server that it dials."""
    keys = KeyPair.generate()
    listener = RawServer(keys.secret)
    with (
        contextlib.closing(listener),
        running("client", str(listener.port), keys.public) as client,
    ):
        worst = 0
        for _ in range(3):
            with listener.accept() as wire:
                assert endless(wire, 100_000, 256 * MB) < 256 * MB
                worst = max(worst, client.grown)
        assert client.process.poll() is None
        assert worst < BOUND
        with listener.accept() as wire:
            filling = b"".join(wire.message(*HARMLESS) for _ in range(80))
            wire.send(filling + b"".join(wire.ping() + wire.message(*HARMLESS) for _ in range(80)))
            wire.reset()
        with listener.accept():
            assert client.process.poll() is None


def wait_for(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Check repeatedly until ``condition`` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
