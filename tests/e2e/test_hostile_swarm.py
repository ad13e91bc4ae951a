"""A hostile PC against every socket of a running swarm, while other clients get answers.

It is a stranger, the holder of a token, or a member with keys of its own that nothing but this test
speaks for. What libzmq would never send, ``tests.support.curve`` does.
"""

import itertools
import os
import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec
import psutil
import pytest

import molink
from molink.swarm.membership.join_token import JoinToken
from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.codec import control_codec, data_codec
from molink.wire.messages.control_plane import JoinRequest
from molink.wire.messages.data_plane import Heartbeat
from molink.wire.messages.membership import JoinEntry, sign_entry
from molink.wire.messages.serving import Cancel
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.home import Home
from molinkd.peer.membership.membership_record import MembershipRecord
from tests.support.curve import COMMAND, GREETING, MORE, RawClient, Refused, frame
from tests.support.processes import Process, Tools

MB = 1 << 20
#: Maximum memory that an attack may cost a process, in bytes.
BOUND = 50 * MB
#: Seconds of attack on one port by one kind of sender, in the short form and in the long one.
SHORT_S, LONG_S = 0.3, 15.0
#: Connections that an attacker leaves open: more than one sender may have.
OPEN = 80
#: Characters of each log that a failure shows.
LOG_END = 2000
MESSAGES = [{"role": "user", "content": "What is molink, and what is it for?"}]


@dataclass(frozen=True)
class Target:
    """A listening socket of the swarm."""

    name: str
    pid: int
    port: int
    server_key: str


class Swarm:
    """A demo seen from outside: its sockets, processes and answers."""

    def __init__(self, demo: Process, tools: type[Tools]) -> None:
        self.demo, self.tools = demo, tools
        self.endpoints = demo.found().endpoints
        status = demo.wait_ready()
        root = demo.found().home.root.parent
        self.homes = [Home(root / f"peer-{number}") for number in (1, 2, 3)]
        member = msgspec.json.decode(self.homes[1].membership.read_bytes(), type=MembershipRecord)
        self.coordinator_key = member.coordinator_key
        self.pids = {"coordinator": status["coordinator"]["pid"]}
        keys = {"coordinator": self.coordinator_key}
        for peer in status["peers"]:
            number = int(peer["name"].rpartition("-")[2])
            key = self.homes[number - 1].load_keys().public
            for kind, pid in [
                ("daemon", peer["daemon_pid"]),
                *(("worker", worker["pid"]) for worker in peer["workers"]),
            ]:
                name = f"{kind} {number}"
                self.pids[name], keys[name] = pid, key
        http = {int(endpoint.rpartition(":")[2]) for endpoint in self.endpoints}
        self.targets = [
            Target(name, pid, port, keys[name])
            for name, pid in self.pids.items()
            for port in sorted(self._listening(pid) - http)
        ]
        self._rss = self.rss()

    @staticmethod
    def _listening(pid: int) -> set[int]:
        connections = psutil.Process(pid).net_connections("tcp")
        return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    def rss(self) -> dict[str, int]:
        """Memory of each process, in bytes; fails with the logs if one is gone."""
        gone = [name for name, pid in self.pids.items() if not psutil.pid_exists(pid)]
        assert not gone, f"{gone} ended:\n{self.logs()}"
        return {name: psutil.Process(pid).memory_info().rss for name, pid in self.pids.items()}

    def logs(self) -> str:
        """The ends of all logs."""
        found = sorted(self.homes[0].root.parent.rglob("*.log"))
        ends = [path.read_text(errors="replace")[-LOG_END:] for path in found]
        return "\n".join(f"{path.name}:\n{end}" for path, end in zip(found, ends, strict=True))

    def fits(self) -> None:
        """Check that every process runs and uses at most its memory bound."""
        grown = {name: rss - self._rss[name] for name, rss in self.rss().items()}
        assert max(grown.values()) < BOUND, grown

    def settle(self) -> None:
        """Measure the memory before the attack."""
        self._rss = self.rss()

    def text(self, endpoint: str) -> str:
        """A greedy answer, streamed."""
        stream = self.tools.client(endpoint).chat.completions.create(
            model="molink-demo",
            messages=MESSAGES,
            stream=True,
            temperature=0,
            max_tokens=40,
            extra_body={"ignore_eos": True},
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    def invite(self) -> JoinToken:
        """A token by ``molink invite``."""
        done = self.tools.run_molink(self.demo.home.root, "invite")
        assert done.returncode == 0, done.stderr
        return JoinToken.parse(done.stdout.strip(), time.time())


@pytest.fixture(scope="module")
def swarm(demo: Process, tools: type[Tools]) -> Swarm:
    swarm = Swarm(demo, tools)
    kinds = {target.name.partition(" ")[0] for target in swarm.targets}
    assert kinds == {"coordinator", "daemon", "worker"}
    return swarm


# --- attacks: each gets a connection and says what it sends ------------------------------------


class Attacker:
    """Runs one attack after the other on one socket until its time is over."""

    def __init__(self, target: Target, keys: KeyPair, seed: int) -> None:
        self._target, self._keys = target, keys
        self._random = random.Random(seed)
        codec = control_codec() if target.name.startswith("coord") else data_codec()
        message = StatusRequest(ref=1) if codec is control_codec() else Cancel("nobody's")
        self._message = [bytes(part) for part in codec.encode(message)]
        self._open: deque[RawClient] = deque()
        self._until = 0.0
        self.over = threading.Event()
        self.done = 0

    def run(self, until: float) -> None:
        """Attack until then, by the monotonic clock, or until it is ``over``."""
        self._until = until
        attacks: list[Callable[[], object]] = [
            *(self.half_a_handshake, self.noise, self.unfinished, self.ping_and_reset),
            *(self.malformed, self.schema, self.flood, self.many, self.replay, self.commands),
        ]
        self._random.shuffle(attacks)
        with ExitStack() as stack:
            stack.callback(self._close, 0)
            for attack in itertools.cycle(attacks):
                if self._ended:
                    return
                # A refused connection is fine, too.
                with suppress(Refused, OSError):
                    attack()
                self.done += 1
                self._close(OPEN)

    @property
    def _ended(self) -> bool:
        return self.over.is_set() or time.monotonic() > self._until

    def dial(self) -> RawClient:
        target = self._target
        wire = RawClient(target.port, self._keys.secret, self._keys.public, target.server_key)
        wire.socket.settimeout(2)
        self._open.append(wire)
        return wire

    def _close(self, left: int) -> None:
        """Close the oldest connections until ``left`` are open."""
        while len(self._open) > left:
            self._open.popleft().close()

    def half_a_handshake(self) -> None:
        """The connection stays open: the server must close it."""
        wire = self.dial()
        steps = [wire.greet, wire.hello, wire.initiate]
        for step in steps[: self._random.randint(0, 3)]:
            step()

    def noise(self) -> None:
        wire = self.dial()
        wire.send(GREETING[: self._random.randint(0, 32)])
        wire.send(self._random.randbytes(self._random.randint(1, 5000)))
        wire.send(b"\x06" + struct.pack(">Q", 1 << 20) + bytes(1 << 18))

    def replay(self) -> None:
        other, wire = self.dial(), self.dial()
        other.handshake()
        wire.greet()
        wire.hello()
        wire.send(other.initiate_bytes)
        wire.ready()

    def many(self) -> None:
        for _ in range(20):
            self.dial().greet()

    def unfinished(self) -> None:
        wire = self.dial().handshake()
        part = bytes(self._random.choice([0, 40, 3000, 200_000]))
        many = max(1, 200_000 // (len(part) + 40))
        going = True
        while going and not self._ended:
            # Encrypted again each time: a nonce is valid once.
            going = wire.send(b"".join(wire.part(part, MORE) for _ in range(many)))

    def ping_and_reset(self) -> None:
        wire = self.dial().handshake()
        filling = b"".join(wire.message(*self._message) for _ in range(80))
        pings = b"".join(wire.ping() + wire.message(*self._message) for _ in range(80))
        wire.send(filling + pings)
        wire.reset()

    def malformed(self) -> None:
        wire = self.dial().handshake()
        wire.send(wire.message(*[b"x"] * 900))
        wire.send(wire.message(self._random.randbytes(100), os.urandom(1000)))
        wire.send(wire.message(self._message[0], bytes(300_000)))
        wire.send(b"\x02" + struct.pack(">Q", 1 << 40))

    def schema(self) -> None:
        """Msgpack that is no message, one of another plane, or a lean one with odd numbers."""
        wire = self.dial().handshake()
        for body in (
            {"type": "status"},
            {"type": "status", "ref": -1},
            {"type": "join", "ref": 1, "public_key": "x" * 4000},
            ["beat", 1 << 62, -5, 1e308],
            {"type": ["deep"] * 500},
        ):
            wire.send(wire.message(msgspec.msgpack.encode(body)))
        nested = b"\x91" * 4000
        wire.send(wire.message(nested))
        beat = Heartbeat(1 << 40, 1 << 40, 5, 1.0)
        wire.send(wire.message(*map(bytes, data_codec().encode(beat))))

    def flood(self) -> None:
        wire = self.dial().handshake()
        for _ in range(5):
            wire.send(b"".join(wire.message(*self._message) for _ in range(500)))

    def commands(self) -> None:
        wire = self.dial().handshake()
        wire.send(wire.part(b"\x09SUBSCRIBE", COMMAND) + wire.part(b"\x04PING", COMMAND))
        wire.send(wire.ping(1) + frame(b"\x05ERROR\xff", 4))


def attacked(swarm: Swarm, keys: KeyPair, seconds: float, seed: int) -> None:
    """Attack all sockets at once as the holder of ``keys``, and have all endpoints answer."""
    want = {swarm.text(endpoint) for endpoint in swarm.endpoints}
    assert len(want) == 1
    swarm.settle()
    attackers = [Attacker(target, keys, seed) for target in swarm.targets]
    until = time.monotonic() + seconds * len(attackers)
    over = threading.Event()
    with ThreadPoolExecutor(len(attackers) + len(swarm.endpoints)) as pool:
        attacks = [pool.submit(attacker.run, until) for attacker in attackers]

        def answers(endpoint: str) -> list[str]:
            texts = [swarm.text(endpoint)]
            while not over.is_set():
                texts.append(swarm.text(endpoint))
            return texts

        streams = [pool.submit(answers, endpoint) for endpoint in swarm.endpoints]
        try:
            while not all(attack.done() for attack in attacks):
                swarm.fits()
                over.wait(0.05)
        finally:
            over.set()
            for attacker in attackers:
                attacker.over.set()
        for attack in attacks:
            attack.result()
        texts = [text for stream in streams for text in stream.result()]
    assert set(texts) == want
    assert all(attacker.done for attacker in attackers)
    swarm.fits()


@pytest.fixture
def stranger() -> KeyPair:
    return KeyPair.generate()


@pytest.fixture
def guest(swarm: Swarm) -> KeyPair:
    """The holder of a token."""
    return KeyPair.from_seed(swarm.invite().secret_key)


@pytest.fixture
def member(swarm: Swarm) -> KeyPair:
    """A member that has no daemon."""
    keys, token = KeyPair.generate(), swarm.invite()
    invitation = KeyPair.from_seed(token.secret_key)
    port = int(token.addresses[0].rpartition(":")[2])
    with RawClient(port, invitation.secret, invitation.public, token.coordinator_key) as wire:
        wire.handshake()
        key = invitation.signer.verify_key
        entry = JoinEntry(key, keys.signer.verify_key, "hostile", time.time())
        request = JoinRequest(
            ref=1,
            public_key=keys.public,
            name="hostile",
            version=molink.__version__,
            protocol=PROTOCOL,
            entry=sign_entry(token.swarm, invitation.signer, entry),
        )
        wire.send(wire.message(*map(bytes, control_codec().encode(request))))
        assert b"join-reply" in wire.receive()[0]
    return keys


@pytest.mark.parametrize("who", ["stranger", "guest", "member"])
def test_attacks_on_every_socket(swarm: Swarm, request: pytest.FixtureRequest, who: str) -> None:
    attacked(swarm, request.getfixturevalue(who), SHORT_S, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("who", ["stranger", "guest", "member"])
def test_long_attacks_on_every_socket(
    swarm: Swarm, request: pytest.FixtureRequest, who: str, seed: int
) -> None:
    attacked(swarm, request.getfixturevalue(who), LONG_S, seed)
