"""The pairing listener on real sockets, with honest and hostile PCs."""

import asyncio
import random
import secrets
import socket
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from molink.errors import (
    InvariantError,
    MolinkError,
    NotAuthorized,
    Overloaded,
    PairingRefused,
    PairingUnanswered,
    PeerBanned,
    RequestError,
    StateError,
    Unavailable,
    UsageError,
    VersionMismatch,
    WireError,
)
from molink.swarm.membership import pairing as pairing_module
from molink.swarm.membership.discovery import DiscoveredSwarm
from molink.swarm.membership.pairing import MAX_JOINERS_PER_ADDRESS, PairingInitiator
from molink.wire.messages.pairing import (
    LENGTH_BYTES,
    Challenge,
    PairingOutcome,
    PairingResult,
    Reveal,
    decode_frame,
    encode_frame,
    parse_frame_length,
)
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator.pairing_listener import PairingConfig, PairingListener
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.membership.pairing_client import (
    PairingCode,
    _raise_unless_admitted,
    request_pairing,
)
from tests.support.net import until

SWARM = "ab" * 8
SWARM_KEYS, PC_KEYS = KeyPair.generate(), KeyPair.generate()
PC_KEY = PC_KEYS.signer.verify_key


class Scene:
    """A listener, the admitted verify keys, and joining PCs."""

    def __init__(self) -> None:
        self.members: list[str] = []
        self.objection: PairingOutcome | None = None
        self.failure: MolinkError | None = None
        self.changes = 0
        self.listener = PairingListener(
            PairingConfig(
                SWARM,
                "attic",
                SWARM_KEYS.public,
                lambda _: self.objection,
                lambda: (5466, ("10.0.0.7:5466", "no address")),
                self.changed,
            )
        )

    def approve(self, code: str, signed: str | None = None) -> str:
        """Approve as a member does: sign the key of the PC that shows the code, or another key."""
        found = self.listener.find_joiner(code)
        key = found.verify_key if signed is None else signed
        self.listener.admit_joiner(code, key, lambda: self.admit(key))
        return found.name

    def admit(self, verify_key: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.members.append(verify_key)

    def changed(self) -> None:
        self.changes += 1

    @property
    def nearby(self) -> DiscoveredSwarm:
        return DiscoveredSwarm("", "", "", ("127.0.0.1",), self.listener.port)

    def pair(
        self, show: Callable[[PairingCode], None] = lambda _: None, patience: float = 60.0
    ) -> "asyncio.Task[MembershipRecord]":
        return asyncio.create_task(request_pairing(self.nearby, PC_KEYS, "pc", show, patience))

    async def code(self) -> str:
        await until(lambda: self.listener.pending_requests)
        return self.listener.pending_requests[0].code


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    before = asyncio.all_tasks()
    scene = Scene()
    scene.listener.open("127.0.0.1", 0)
    yield scene
    await scene.listener.close()
    assert asyncio.all_tasks() <= {*before, asyncio.current_task()}


class Raw:
    """A raw connection for arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, scene: Scene) -> "Raw":
        return cls(*await asyncio.open_connection("127.0.0.1", scene.listener.port))

    async def hear(self) -> Challenge | PairingResult | None:
        """Read the next message; ``None`` once the connection has ended."""
        try:
            length = parse_frame_length(await self.reader.readexactly(LENGTH_BYTES))
            return decode_frame(await self.reader.readexactly(length), Challenge | PairingResult)
        except (OSError, asyncio.IncompleteReadError):
            return None

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


async def test_approved_pc_is_admitted(scene: Scene) -> None:
    shown: list[PairingCode] = []
    pairing = scene.pair(shown.append)
    code = await scene.code()
    assert len(scene.listener.pending_requests) == 1
    await until(lambda: shown)
    assert shown == [PairingCode(SWARM, "attic", code)]
    assert scene.approve(code) == "pc"
    assert scene.members == [PC_KEY]
    assert await pairing == MembershipRecord(
        swarm=SWARM,
        coordinator_key=SWARM_KEYS.public,
        addresses=("127.0.0.1:5466", "10.0.0.7:5466"),
    )
    assert scene.listener.pending_requests == []


@pytest.mark.parametrize(
    "signed",
    ["", PC_KEYS.public, KeyPair.generate().signer.verify_key],
    ids=["nothing", "the CURVE key", "another key"],
)
async def test_signature_for_another_key_admits_nobody(scene: Scene, signed: str) -> None:
    """The PC keeps waiting for a member that signs for its key."""
    pairing = scene.pair()
    code = await scene.code()
    with pytest.raises(RequestError, match="has another key"):
        scene.approve(code, signed)
    assert scene.members == []
    assert not pairing.done()
    assert scene.approve(code) == "pc"
    assert (await pairing).swarm == SWARM
    assert scene.members == [PC_KEY]


async def test_rejected_pc_is_told_why(scene: Scene) -> None:
    pairing = scene.pair()
    assert scene.listener.refuse_joiner(await scene.code()) == "pc"
    with pytest.raises(PairingRefused):
        await pairing
    for decide in (scene.approve, scene.listener.refuse_joiner):
        with pytest.raises(RequestError, match="no waiting PC"):
            decide("0000-0000")
    assert scene.members == []


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (Unavailable("the swarm has 64 PCs"), Unavailable, "is full"),
        (Overloaded("too many at once"), Unavailable, "too many PCs are joining"),
        (NotAuthorized("an entry of another PC"), PairingRefused, "refused"),
        # The swarm didn't refuse it, and it may be a member already.
        (StateError("the disk is full"), Unavailable, "run `molink join` again"),
        (InvariantError("an entry twice"), Unavailable, "run `molink join` again"),
    ],
)
async def test_pc_that_can_not_be_admitted_is_told_why(
    scene: Scene, failure: MolinkError, error: type[MolinkError], text: str
) -> None:
    pairing = scene.pair()
    scene.failure = failure
    with pytest.raises(type(failure), match=str(failure)):
        scene.approve(await scene.code())
    with pytest.raises(error, match=text):
        await pairing
    assert scene.members == []


@pytest.mark.parametrize(
    ("objection", "error", "text"),
    [
        ("revoked", PeerBanned, "removed from"),
        ("full", Unavailable, "is full"),
        ("duplicate", UsageError, r"peer\.key"),
        ("refused", PairingRefused, "refused"),
    ],
)
async def test_inadmissible_keys_are_rejected(
    scene: Scene, objection: PairingOutcome, error: type[MolinkError], text: str
) -> None:
    scene.objection = objection
    with pytest.raises(error, match=text):
        await scene.pair()
    assert scene.changes == 0


async def test_pending_pc_expires(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_module, "DECISION_TIMEOUT_S", 0.0)
    pairing = scene.pair()
    await until(lambda: scene.changes)
    scene.listener.on_timer()
    with pytest.raises(PairingUnanswered):
        await pairing


async def test_disconnected_pc_is_dropped(scene: Scene) -> None:
    pairing = scene.pair()
    code = await scene.code()
    pairing.cancel()
    await until(lambda: not scene.listener.pending_requests)
    with pytest.raises(RequestError, match="no waiting PC"):
        scene.approve(code)


async def test_closed_listener_ends_pairing(scene: Scene) -> None:
    pairing = scene.pair()
    await scene.code()
    await scene.listener.close()
    with pytest.raises(Unavailable, match="was lost"):
        await pairing


async def test_unexpected_swarm_is_rejected(scene: Scene) -> None:
    for swarm, key in (("cd" * 8, SWARM_KEYS.public), (SWARM, PC_KEYS.public)):
        nearby = DiscoveredSwarm(swarm, "attic", key, ("127.0.0.1",), scene.listener.port)
        with pytest.raises(WireError, match="impersonates"):
            await request_pairing(nearby, PC_KEYS, "pc", lambda _: None)
    assert scene.listener.pending_requests == []


async def test_unreachable_swarm_is_reported(scene: Scene) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nearby = DiscoveredSwarm("", "", "", ("127.0.0.1",), free.getsockname()[1])
        with pytest.raises(Unavailable, match="can't reach the swarm"):
            await request_pairing(nearby, PC_KEYS, "pc", lambda _: None)

    async def other(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03")  # ZeroMQ
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(WireError, match="something other than molink"):
            await request_pairing(
                DiscoveredSwarm("", "", "", ("127.0.0.1",), port), PC_KEYS, "pc", lambda _: None
            )


# --- a hostile PC --------------------------------------------------------------------------------


async def test_replayed_pairing_gets_another_code(scene: Scene) -> None:
    """A full replay admits nobody unless its own code is approved."""
    initiator = PairingInitiator(PC_KEY, "pc", "1", secrets.token_bytes(32))
    codes, raws = [], []
    for _ in range(2):
        raw = await Raw.dial(scene)
        raw.writer.write(encode_frame(initiator.commitment))
        challenge = await raw.hear()
        assert isinstance(challenge, Challenge)
        reveal, code = initiator.answer_challenge(challenge)
        raw.writer.write(encode_frame(reveal))
        codes.append(code)
        raws.append(raw)
    await until(lambda: len(scene.listener.pending_requests) == 2)
    assert len(set(codes)) == 2
    scene.approve(codes[0])
    assert (await raws[0].hear()) is not None
    assert [one.code for one in scene.listener.pending_requests] == codes[1:]
    for raw in raws:
        await raw.close()


async def test_man_in_the_middle_is_exposed(scene: Scene) -> None:
    """The attacker relays with its own key; PC and swarm show different codes."""
    evil = KeyPair.generate()
    shown: list[PairingCode] = []
    done = asyncio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pc, swarm = Raw(reader, writer), await Raw.dial(scene)
        length = parse_frame_length(await reader.readexactly(LENGTH_BYTES))
        await reader.readexactly(length)  # the PC's commitment
        mine = PairingInitiator(evil.signer.verify_key, "pc", "1", secrets.token_bytes(32))
        swarm.writer.write(encode_frame(mine.commitment))
        challenge = await swarm.hear()
        assert isinstance(challenge, Challenge)
        mine_too = Challenge(
            swarm=SWARM, name="attic", public_key=evil.public, nonce=challenge.nonce
        )
        writer.write(encode_frame(mine_too))
        swarm.writer.write(encode_frame(mine.answer_challenge(challenge)[0]))
        await done.wait()
        await swarm.close()
        await pc.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        nearby = DiscoveredSwarm("", "", "", ("127.0.0.1",), server.sockets[0].getsockname()[1])
        pairing = asyncio.create_task(request_pairing(nearby, PC_KEYS, "pc", shown.append))
        await until(lambda: shown and scene.listener.pending_requests)
        assert scene.listener.pending_requests[0].code != shown[0].code
        with pytest.raises(RequestError, match="no waiting PC"):
            scene.approve(shown[0].code)
        done.set()
        with pytest.raises(Unavailable):
            await pairing
    assert scene.members == []


async def test_pairing_with_a_foreign_key_admits_only_that_key(scene: Scene) -> None:
    """Only the key's owner can use the membership, and its own request is unaffected."""
    pairing = scene.pair()
    own = await scene.code()
    raw = await Raw.dial(scene)
    initiator = PairingInitiator(PC_KEY, "pc", "1", secrets.token_bytes(32))
    raw.writer.write(encode_frame(initiator.commitment))
    challenge = await raw.hear()
    assert isinstance(challenge, Challenge)
    raw.writer.write(encode_frame(initiator.answer_challenge(challenge)[0]))
    await until(lambda: len(scene.listener.pending_requests) == 2)
    scene.approve(own)
    assert (await pairing).swarm == SWARM
    await raw.close()


async def test_invalid_message_ends_the_connection(scene: Scene) -> None:
    chance = random.Random(1)
    asked = PairingInitiator(PC_KEY, "pc", "1", bytes(32)).commitment
    giant = b"\xff\xff" + bytes(1 << 20)
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0",
        giant,
        b"\x04\x00" + chance.randbytes(1024),
        encode_frame(Reveal(nonce=bytes(32))),
        encode_frame(PairingResult(outcome="admitted")),
        encode_frame(asked) * 2,
        encode_frame(asked) + encode_frame(Reveal(nonce=b"\1" * 32)),
    ):
        raw = await Raw.dial(scene)
        raw.writer.write(data)
        while await raw.hear() is not None:
            pass
        await raw.close()
    assert scene.listener.pending_requests == []
    assert scene.changes == 0


async def test_half_open_connections_do_not_block_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections per address are few and expire, and a new one replaces the oldest."""
    begun = [await Raw.dial(scene) for _ in range(MAX_JOINERS_PER_ADDRESS)]
    begun[0].writer.write(struct.pack(">H", 500) + b"half")
    await until(lambda: len(scene.listener._writers) == MAX_JOINERS_PER_ADDRESS)
    pairing = scene.pair()
    code = await scene.code()
    closed = [asyncio.create_task(raw.hear()) for raw in begun]
    await until(lambda: sum(one.done() for one in closed) == 1)
    scene.approve(code)
    await pairing
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: 1e9)
        scene.listener.on_timer()
    assert await asyncio.gather(*closed) == [None] * MAX_JOINERS_PER_ADDRESS
    for raw in begun:
        await raw.close()


async def test_flood_is_rate_limited(scene: Scene) -> None:
    """Connections are accepted at a limited rate, and pending PCs stay pending."""
    pairing = scene.pair()
    code = await scene.code()
    tracemalloc.start()
    try:
        for _ in range(100):
            with socket.socket() as one:
                one.setblocking(False)
                with suppress(OSError):
                    one.connect(("127.0.0.1", scene.listener.port))
                with suppress(OSError):
                    one.send(b"\x04\x00" + bytes(1024))
            await asyncio.sleep(0)
        grown = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert grown < 10 << 20
    assert len(scene.listener._writers) <= 1 + MAX_JOINERS_PER_ADDRESS
    scene.approve(code)
    assert (await pairing).swarm == SWARM


async def test_incompatible_pc_is_never_pending(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molink.swarm.membership.pairing.PROTOCOL", PROTOCOL + 1)
    with pytest.raises(VersionMismatch):
        await scene.pair()
    assert scene.listener.pending_requests == []


def test_incompatible_pc_is_told_what_to_update() -> None:
    with pytest.raises(VersionMismatch, match=r"the swarm molink 99\.0 \(protocol 99\)"):
        _raise_unless_admitted(
            PairingResult(outcome="version", version="99.0", protocol=99), "", "`molink join`"
        )
