"""The coordinator process."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq.asyncio
from zmq.asyncio import Context

from molink.errors import NotAuthorized, TokenError
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.join_token import JoinToken
from molink.wire.messages.admin import InviteReply, InviteRequest, StatusRequest
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage, JoinReply, JoinRequest
from molink.wire.messages.membership import JoinEntry, sign_entry
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.client import Client
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.membership.membership_requests import send_membership_request


class Process:
    """``python -m molinkd.coordinator`` with a pipe to it."""

    def __init__(self, folder: Path, owner: KeyPair, *more: str) -> None:
        self.child = subprocess.Popen(
            [
                *(sys.executable, "-m", "molinkd.coordinator", "--state", str(folder)),
                *("--host", "127.0.0.1"),
                *("--member", f"{owner.signer.verify_key}:owner", *more),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def announcement(self) -> dict[str, int | str]:
        return json.loads(self.child.stdout.readline())

    def end(self) -> tuple[int, str]:
        """Close the process's input; returns its exit code and log."""
        _, log = self.child.communicate(timeout=60)
        return self.child.returncode, log


Launch = Callable[..., Process]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Process] = []

    def launch(folder: Path, owner: KeyPair, *more: str) -> Process:
        started.append(Process(tmp_path / folder, owner, *more))
        return started[-1]

    yield launch
    for process in started:
        process.child.kill()
        process.child.communicate()


@pytest.fixture
def context() -> Iterator[Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def ask(
    context: Context,
    keys: KeyPair,
    server_key: str,
    addresses: list[str],
    message: ControlMessage,
    timeout: float = 60.0,
) -> tuple[ControlMessage, bytes]:
    """Send one request over a new connection."""
    client = Client(context, keys, control_codec(), server_key, addresses)
    client.start()
    try:
        reply, payload = await client.send_request(message, timeout=timeout)
        return reply, b"" if payload is None else bytes(payload)
    finally:
        await client.close()


async def test_process_lifecycle(launch: Launch, context: Context) -> None:
    owner, joiner = KeyPair.generate(), KeyPair.generate()
    process = launch("swarm", owner, "--port", "0")
    said = process.announcement()
    known = {"port", "public_key", "swarm", "term", "addresses", "restored", "name", "pairing_port"}
    assert said.keys() == known
    assert said["pairing_port"] == 0, "pairing is off by default"
    where = (said["public_key"], [f"tcp://127.0.0.1:{said['port']}"])

    async def ask_as_owner(message: ControlMessage) -> tuple[ControlMessage, bytes]:
        return await ask(context, owner, *where, message)

    reply = await send_membership_request(
        InviteRequest(ref=0), owner, said["swarm"], said["public_key"], ask_as_owner
    )
    assert isinstance(reply, InviteReply)
    token = JoinToken.parse(reply.token, time.time())
    assert (token.swarm, token.coordinator_key) == (said["swarm"], said["public_key"])
    assert token.addresses == (f"127.0.0.1:{said['port']}",)
    with pytest.raises(TokenError, match="cut off or mistyped"):
        JoinToken.parse(reply.token[:-6], time.time())
    with pytest.raises(TokenError, match="expired on"):
        JoinToken.parse(reply.token, time.time() + 90_000)

    with pytest.raises(NotAuthorized):
        await ask(context, joiner, *where, StatusRequest(ref=0))
    invited = KeyPair.from_seed(token.secret_key)
    entry = JoinEntry(invited.signer.verify_key, joiner.signer.verify_key, "joiner", 1.0)
    request = JoinRequest(
        ref=0,
        public_key=joiner.public,
        name="joiner",
        version="1",
        protocol=PROTOCOL,
        entry=sign_entry(token.swarm, invited.signer, entry),
    )
    joined, _ = await ask(context, invited, *where, request)
    assert isinstance(joined, JoinReply)
    assert joined.peer == derive_peer_id(joiner.public)

    process.child.kill()
    process.child.communicate()
    again = launch("swarm", owner)
    assert again.announcement() == said
    _, payload = await ask(context, joiner, *where, StatusRequest(ref=0))
    status = json.loads(payload)
    assert [(peer["name"], peer["state"]) for peer in status["peers"]] == [
        ("owner", "offline"),
        ("joiner", "offline"),
    ]

    other = launch("other", owner, "--port", "0")
    elsewhere = other.announcement()
    foreign = (elsewhere["public_key"], [f"tcp://127.0.0.1:{elsewhere['port']}"])
    with pytest.raises(NotAuthorized):
        await ask(context, invited, *foreign, request)
    for process in (again, other):
        code, _ = process.end()
        assert code == 0


def test_second_process_fails_with_a_one_line_error(launch: Launch, tmp_path: Path) -> None:
    owner = KeyPair.generate()
    first = launch("swarm", owner, "--port", "0")
    first.announcement()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "coordinator.key").write_text("nonsense", encoding="utf-8")
    code, log = launch("broken", owner).end()
    assert code == 2
    assert log.splitlines()[-1].startswith("error: ")
    assert "holds no key" in log
    assert "Traceback" not in log


def test_process_ends_with_its_parent(launch: Launch) -> None:
    process = launch("swarm", KeyPair.generate(), "--port", "0")
    process.announcement()
    process.child.stdin.close()
    assert process.child.wait(timeout=60) == 0
    process.child.stdin = None


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
def test_descriptor_limit_is_raised(tmp_path: Path) -> None:
    import resource

    import psutil

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource, runpy, sys;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}));"
        "runpy.run_module('molinkd.coordinator', run_name='__main__')"
    )
    arguments = ["--state", str(tmp_path), "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert json.loads(process.stdout.readline())
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] > 256
        process.communicate(timeout=60)
