"""Settings of additional devices' daemons, and their supervision."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from molink.errors import PeerBanned, RequestError, Unavailable
from molink.facts.device import Device
from molink.swarm.membership.join_token import JoinToken
from molink.wire.messages.admin import InviteReply, InviteRequest
from molinkd.peer.agent import device_daemons as devices
from molinkd.peer.agent.device_daemons import (
    DeviceDaemons,
    additional_devices,
    device_labels,
    device_settings,
    primary_device_settings,
)
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.home import Home
from molinkd.peer.launch import Launch, ProblemReportedEvent
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.settings import MemoryShare, Settings


def gpu(index: int, of: int) -> MeasuredDevice:
    return MeasuredDevice(Device(kind="cuda", index=index, name="x", memory=1), bf16=True, gpus=of)


CPU = MeasuredDevice(Device(kind="cpu", name="x", memory=1), bf16=True, gpus=0)


@pytest.mark.parametrize(
    ("settings", "measured", "expected"),
    [
        ({}, CPU, ()),
        ({}, gpu(0, 1), ()),
        ({}, gpu(1, 3), ("cuda:0", "cuda:2")),
        ({"stage": "1-4"}, gpu(0, 2), ()),
        ({"stage": "none", "device": "cuda:0,cuda:1"}, gpu(0, 2), ()),
        ({"device": "cuda:1"}, gpu(1, 2), ()),
        ({"device": "cuda:1,cuda:0"}, gpu(1, 2), ("cuda:0",)),
        ({"device": "cuda:0,cpu"}, gpu(0, 2), ("cpu",)),
        ({"device": "cpu,cpu"}, CPU, ("cpu",)),
    ],
)
def test_additional_devices(
    settings: dict[str, str], measured: MeasuredDevice, expected: tuple[str, ...]
) -> None:
    assert additional_devices(Settings(name="pc", **settings), measured) == expected


def test_a_repeated_device_is_shared_and_gets_its_own_label() -> None:
    assert device_labels("cpu", ["cpu", "cuda:0", "cpu"]) == ["cpu.2", "cuda:0", "cpu.3"]
    whole = Settings(name="pc", device="cpu,cuda:0,cpu", memory=8 << 30, stage="auto")
    own = primary_device_settings(whole)
    assert (own.device, own.memory, own.stages_per_host) == ("cpu", 4 << 30, 2)
    assert own.replicate_models
    card = device_settings(whole, "cuda:0")
    assert (card.device, card.memory, card.stages_per_host) == ("cuda:0", 8 << 30, 1)
    # Replicating, relaying and announcing are the first daemon's task: this one is lost with the
    # PC.
    assert [card.replicate_models, card.relay, card.discovery] == [False] * 3
    half = primary_device_settings(msgspec.structs.replace(whole, memory=MemoryShare(50.0)))
    assert half.memory == MemoryShare(25.0)


SWARM = MembershipRecord(swarm="s", coordinator_key="k" * 40, addresses=("127.0.0.1:5466",))
TOKEN = JoinToken("s", ("203.0.113.7:5466",), "k" * 40, "i" * 40)

#: Fake daemon of a device; the file ``code`` holds its exit code.
DAEMON = """
import json, pathlib, sys
order = json.loads(sys.stdin.readline())
home = pathlib.Path(order["home"])
with (home / "started").open("a") as file:
    file.write(json.dumps(order) + "\\n")
code = int((home.parent.parent.parent / "code").read_text())
if code:
    print(json.dumps({"event": "ended", "code": code, "text": "no luck"}), flush=True)
    sys.exit(code)
sys.stdin.read()
"""


class Pc:
    """A PC with two devices; the second one's daemon is a fake."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder).create_folders()
        self.said: list[Any] = []
        self.asked = 0
        settings = Settings(name="pc", host="127.0.0.1", device="cpu,cpu")
        self.context = zmq.asyncio.Context()
        self.devices = DeviceDaemons(
            settings, self.home, "me", lambda: "pc-2", self.context, self.said.append
        )
        self.place = Home(self.home.devices / "me" / "cpu.2")

    async def ask(self, message: Any) -> Any:
        assert isinstance(message, InviteRequest)
        assert message.uses == 1
        self.asked += 1
        if self.asked == 1:
            raise Unavailable("nobody leads yet")
        return InviteReply(ref=0, token=str(TOKEN), id="i")

    def ends(self, code: int) -> None:
        (self.home.root / "code").write_text(str(code))

    def starts(self) -> list[Launch]:
        try:
            lines = (self.place.root / "started").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [msgspec.json.decode(line, type=Launch) for line in lines]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 (it is other processes that are waited for)
                await asyncio.sleep(0.02)


@pytest.fixture
def pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pc]:
    monkeypatch.setattr(devices, "DAEMON_COMMAND", (sys.executable, "-c", DAEMON))
    monkeypatch.setattr(devices, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(devices, "_RETRY_S", 0.01)
    found = Pc(tmp_path)
    yield found
    found.context.destroy()


async def test_a_daemon_that_exits_is_restarted_and_reported(pc: Pc) -> None:
    pc.ends(3)
    pc.devices.start_daemons(CPU, lambda: SWARM, pc.ask)
    try:
        await pc.until(lambda: len(pc.starts()) >= 2)
        pc.ends(0)
        first = pc.starts()[0]
        assert (first.role, first.pc) == ("join", "me")
        # The token's addresses are those at which this PC reaches the coordinator.
        assert first.token is not None
        assert JoinToken.parse(first.token, 0).addresses == SWARM.addresses
        assert first.settings.name == "pc-2/cpu.2"
        reported = next(one.text for one in pc.said if isinstance(one, ProblemReportedEvent))
        assert reported.startswith("cpu.2 holds no layers: no luck; restarting in")
        with pytest.raises(RequestError, match=r"no device cuda:1; it has cpu\.2"):
            pc.devices.set_drained(True, "cuda:1")
    finally:
        await pc.devices.close()


async def test_a_banned_device_is_not_restarted(pc: Pc) -> None:
    """It was started without a token, since its home has a membership of this swarm."""
    pc.ends(PeerBanned.exit_code)
    pc.place.create_folders()
    SWARM.save(pc.place.membership)
    pc.devices.start_daemons(CPU, lambda: SWARM, pc.ask)
    try:
        await pc.until(lambda: any(isinstance(one, ProblemReportedEvent) for one in pc.said))
        assert pc.said == [ProblemReportedEvent(text="cpu.2: no luck")]
        assert [one.token for one in pc.starts()] == [None]
    finally:
        await pc.devices.close()


async def test_leftovers_of_another_swarm_are_deleted(pc: Pc) -> None:
    pc.ends(0)
    pc.place.create_folders()
    MembershipRecord(swarm="other", coordinator_key="k", addresses=()).save(pc.place.membership)
    pc.devices.start_daemons(CPU, lambda: SWARM, pc.ask)
    try:
        await pc.until(lambda: len(pc.starts()) == 1)
        assert not pc.place.membership.exists()
        assert pc.starts()[0].token is not None
    finally:
        await pc.devices.close()
