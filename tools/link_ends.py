"""The two ends of a measured link, each a process in a namespace of its own.

    python -m tools.link_ends send|receive

A line of JSON on stdin says what to do; lines of JSON on stdout tell what came of it.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

import zmq.asyncio

from molink.link.base import LinkName
from molink.link.heartbeat import StageProgress
from molink.link.in_link import InLink, InLinkEvents
from molink.link.out_link import OutLink, OutLinkEvents
from molink.link.policies.base import DecodeFinishedEvent, DecodeStartedEvent
from molink.link.policies.create import create_policy
from molink.link.receiver import Arrival, LinkReceiver
from molink.link.sender import LinkSender
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import RequestSlice, Volume
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.worker.connector import StageConnector

LINK, HIDDEN = LinkName("bench", 0), 4096
ROW = HIDDEN * 2
DECODE_ROWS = 2
#: Seconds between decode volumes, at random within these.
GAP = (0.05, 0.15)
#: Pause after a prefill volume.
REST = 0.5


def _data(tick: int, rows: int) -> bytes:
    return tick.to_bytes(8, "little") * (rows * ROW // 8)


async def receive(config: dict[str, Any]) -> dict[str, Any]:
    """Take volumes until stdin ends; when each one came, as ``[tick, seconds, bytes]``."""
    context = zmq.asyncio.Context()
    gatekeeper = ZapAuthenticator(context)
    gatekeeper.start()
    user = gatekeeper.allow_peer(config["client_public"])
    arrivals: list[tuple[int, float, int]] = []
    wrong: list[int] = []

    def arrived(arrival: Arrival) -> None:
        body, data = arrival.body, arrival.payload
        if isinstance(body, Volume) and data is not None:
            arrivals.append((body.seq, time.monotonic(), len(data)))
            if config.get("verify") and data != _data(body.seq, len(data) // ROW):
                wrong.append(body.seq)

    def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        incoming.handle_message(sender, message, payload)

    server = Server(
        context,
        KeyPair.from_secret(config["server_secret"]),
        data_codec(),
        gatekeeper,
        handle,
    )
    receiver = LinkReceiver(1, HIDDEN, "bf16")
    loop = asyncio.get_running_loop()
    incoming = InLink(loop, server, receiver, LINK, user, InLinkEvents(_progress, arrived))
    _say({"port": server.bind(config["address"], (0, 1))})
    before = time.process_time()
    await loop.run_in_executor(None, sys.stdin.readline)
    result = {
        "arrivals": arrivals,
        "wrong": wrong,
        "cpu_s": time.process_time() - before,
        "epoch": receiver.epoch,
        "duplicates": receiver.counters.duplicates,
    }
    incoming.close()
    await server.close()
    gatekeeper.close()
    context.term()
    return result


def _progress() -> StageProgress:
    return StageProgress(0, 0, has_requests=True)


class Sending:
    """The sending end."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._random = random.Random(config["seed"])
        self._context = zmq.asyncio.Context()
        self._dead: str | None = None
        self._dialer = StageConnector(
            self._context,
            KeyPair.from_secret(config["client_secret"]),
            config["server_public"],
            [config["server"]],
        )
        self.link = OutLink(
            asyncio.get_running_loop(),
            self._dialer.open_connection,
            LinkSender(1, create_policy(config["policy"])),
            LINK,
            OutLinkEvents(_progress, self._died),
        )
        self._tick = 0
        #: ``[tick, seconds, whether prefill]`` of each volume that was handed over.
        self.handed: list[tuple[int, float, bool]] = []

    def _died(self, reason: str) -> None:
        self._dead = reason

    def volume(self, rows: int, prefill: bool) -> int:
        """Hand a volume over; its tick."""
        self._tick += 1
        data = _data(self._tick, rows)
        header = Volume(
            self._tick, prefill, (RequestSlice(1, 0, rows, 0),), Payload("bf16", (rows, HIDDEN))
        )
        self.handed.append((self._tick, time.monotonic(), prefill))
        self.link.send_volume(header, data)
        return self._tick

    async def decode(self, stop: asyncio.Event) -> None:
        """Decode volumes at random moments until ``stop``."""
        while not stop.is_set():
            gap = self._random.uniform(*GAP)
            guess = gap * self._random.uniform(0.9, 1.1)
            self.link.handle_event(DecodeFinishedEvent(DECODE_ROWS, guess))
            await asyncio.sleep(gap)
            self.link.handle_event(DecodeStartedEvent(DECODE_ROWS, 0.0))
            self.volume(DECODE_ROWS, prefill=False)

    async def arrived(self) -> None:
        """Wait until all that was handed over has been acknowledged."""
        while self.link.stats.unacknowledged_bytes or self.link.stats.queued_bytes:
            if self._dead is not None:
                return
            await asyncio.sleep(0.002)

    async def measure(self) -> None:
        """Decode volumes alone, then prefill volumes, with decode volumes beside them or not."""
        config = self._config
        stop = asyncio.Event()
        decoding = None
        if config["decode"]:
            decoding = asyncio.create_task(self.decode(stop))
            await asyncio.sleep(config["idle_s"])
        for number in range(config["prefills"]):
            await asyncio.sleep(REST * self._random.uniform(0.8, 1.2))
            tick = self.volume(config["prefill_rows"], prefill=True)
            if number == 0:
                _say({"prefill": tick})
            await self.bulk_sent()
        stop.set()
        if decoding is not None:
            await decoding
        await self.arrived()

    async def bulk_sent(self) -> None:
        """Wait until fewer bytes are under way than a prefill volume has: it has arrived."""
        while self._dead is None:
            stats = self.link.stats
            if stats.queued_bytes + stats.unacknowledged_bytes < 4 * DECODE_ROWS * ROW:
                return
            await asyncio.sleep(0.002)

    async def fill(self) -> None:
        """Prefill volumes without a pause."""
        stop = time.monotonic() + self._config["seconds"]
        rows = self._config["prefill_rows"]
        while time.monotonic() < stop:
            if self.link.stats.queued_bytes < 2 * rows * ROW:
                self.volume(rows, prefill=True)
            await asyncio.sleep(0.001)
        await self.arrived()

    async def run(self) -> dict[str, Any]:
        """Connect, do what was asked for, and report."""
        self.link.start()
        async with asyncio.timeout(20):
            while not self.link.stats.rtt:  # noqa: ASYNC110  a figure, not an event
                await asyncio.sleep(0.01)
        before = time.process_time()
        await (self.fill() if self._config.get("seconds") else self.measure())
        stats = self.link.stats
        result = {
            "handed": self.handed,
            "cpu_s": time.process_time() - before,
            "dead": self._dead,
            "connects": stats.connects,
            "resent": stats.resent,
        }
        self.link.close()
        await self._dialer.close()
        self._context.term()
        return result


async def send(config: dict[str, Any]) -> dict[str, Any]:
    """The sending end, from its connection to its report."""
    return await Sending(config).run()


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    """Be one of the ends."""
    config = json.loads(sys.stdin.readline())
    end = {"send": send, "receive": receive}[sys.argv[1]]
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        _say(runner.run(end(config)))


if __name__ == "__main__":
    main()
