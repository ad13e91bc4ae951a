"""Measure a CURVE connection on loopback and print JSON.

    python tools/bench_wire.py [--seconds S]

``latency_ms``: a 4 KB message there and a small one back, one at a time, halved. ``throughput``:
192 KB frames one way, in a process of its own. ``link``: the same through a LinkSender and a
LinkReceiver with acknowledgements. ``loop_busy``: share of one core that the sender's loop took.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import time
from typing import Any

import zmq
import zmq.asyncio

from molink.link.base import LinkName
from molink.link.heartbeat import StageProgress
from molink.link.in_link import InLink, InLinkEvents
from molink.link.out_link import OutLink, OutLinkEvents
from molink.link.policies.create import create_policy
from molink.link.receiver import LinkReceiver
from molink.link.sender import LinkSender
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import RequestSlice, Volume
from molink.wire.messages.serving import Cancel, PromptFragment
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import Server
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.worker.connector import StageConnector

SMALL, LARGE, HIDDEN = 4096, 192 * 1024, 1024
PIPELINE = "bench"


def serve(pipe: Any, server_secret: str, client_public: str) -> None:
    """The other process: answers prompts, takes a link, reports the bytes that came."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(_serve(pipe, KeyPair.from_secret(server_secret), client_public))


async def _serve(pipe: Any, keys: KeyPair, client_public: str) -> None:
    context = zmq.asyncio.Context()
    gatekeeper = ZapAuthenticator(context)
    gatekeeper.start()
    user = gatekeeper.allow_peer(client_public)
    done = asyncio.Event()

    def handle(sender: Any, message: Any, payload: memoryview | None) -> None:
        if isinstance(message, Cancel) and message.key == "stop":
            done.set()
        elif isinstance(message, PromptFragment | Cancel) and message.key != "flow":
            server.send(sender.identity, Cancel("ack"))
        else:
            incoming.handle_message(sender, message, payload)

    server = Server(context, keys, data_codec(), gatekeeper, handle)
    idle = StageProgress(0, 0, has_requests=True)
    receiver = LinkReceiver(1, HIDDEN, "bf16")
    events = InLinkEvents(lambda: idle, lambda _: None)
    loop = asyncio.get_running_loop()
    incoming = InLink(loop, server, receiver, LinkName(PIPELINE, 0), user, events)
    pipe.send(server.bind("127.0.0.1", (0, 1)))
    await done.wait()
    incoming.close()
    await server.close()
    gatekeeper.close()
    context.term()


class Bench:
    """The measuring process."""

    def __init__(self, port: int, keys: KeyPair, server_key: str, seconds: float) -> None:
        self.context = zmq.asyncio.Context()
        self.keys, self.server_key, self.seconds = keys, server_key, seconds
        self.address = f"tcp://127.0.0.1:{port}"
        self.answers: asyncio.Queue[float] = asyncio.Queue()
        self.client: Client[Any] = Client(
            self.context,
            keys,
            data_codec(),
            server_key,
            [self.address],
            events=ClientEvents(
                on_message=lambda *_: self.answers.put_nowait(time.perf_counter()),
                on_drained=lambda: self.drained.set(),
            ),
        )
        self.drained = asyncio.Event()

    async def latency(self) -> dict[str, float]:
        """Half of there and back, in ms."""
        message = PromptFragment("k", 0, Payload("u8", (SMALL,)))
        data, taken = bytes(SMALL), []
        stop = time.perf_counter() + self.seconds
        while (start := time.perf_counter()) < stop:
            self.client.send(message, data)
            taken.append((await self.answers.get() - start) / 2 * 1000)
        quantiles = statistics.quantiles(taken, n=100)
        return {"p50": round(quantiles[49], 4), "p99": round(quantiles[98], 4), "n": len(taken)}

    async def throughput(self) -> dict[str, float]:
        """Bytes/s of large frames, until the last has been answered for."""
        message = PromptFragment("flow", 0, Payload("u8", (LARGE,)))
        data, sent = bytes(LARGE), 0
        start, busy = time.perf_counter(), time.thread_time()
        while time.perf_counter() - start < self.seconds:
            self.drained.clear()
            self.client.send(message, data)
            sent += 1
            if self.client.is_congested:
                await self.drained.wait()
            else:
                await asyncio.sleep(0)
        self.client.send(Cancel("end"))
        await self.answers.get()
        return _rate(sent * LARGE, start, busy)

    async def link(self) -> dict[str, float]:
        """Bytes/s of prefill volumes through a link, acknowledged."""
        idle = StageProgress(0, 0, has_requests=True)
        dialer = StageConnector(self.context, self.keys, self.server_key, [self.address])
        link = OutLink(
            asyncio.get_running_loop(),
            dialer.open_connection,
            LinkSender(1, create_policy("fifo")),
            LinkName(PIPELINE, 0),
            OutLinkEvents(lambda: idle, print),
        )
        link.start()
        rows = 512
        data = bytes(rows * HIDDEN * 2)
        start, busy, tick = time.perf_counter(), time.thread_time(), 0
        while time.perf_counter() - start < self.seconds:
            if link.stats.queued_bytes < 4 * len(data):
                payload = Payload("bf16", (rows, HIDDEN))
                link.send_volume(Volume(tick, True, (RequestSlice(1, 0, rows, 0),), payload), data)
                tick += 1
            await asyncio.sleep(0)
        while link.stats.unacknowledged_bytes:  # noqa: ASYNC110  a counter, not an event
            await asyncio.sleep(0.001)
        result = _rate(tick * len(data), start, busy)
        result["rtt_ms"] = round(link.stats.min_rtt * 1000, 3)
        link.close()
        await dialer.close()
        return result

    async def run(self) -> dict[str, Any]:
        """All measurements."""
        self.client.start()
        await self.client.wait_connected(10)
        result = {
            "latency_ms": await self.latency(),
            "throughput": await self.throughput(),
            "link": await self.link(),
            "python": platform.python_version(),
            "libzmq": zmq.zmq_version(),
        }
        self.client.send(Cancel("stop"))
        await asyncio.sleep(0.1)
        await self.client.close()
        self.context.term()
        return result


def _rate(nbytes: int, start: float, busy: float) -> dict[str, float]:
    seconds = time.perf_counter() - start
    return {
        "bytes_per_s": round(nbytes / seconds),
        "loop_busy": round((time.thread_time() - busy) / seconds, 3),
    }


async def _measure(*arguments: Any) -> dict[str, Any]:
    return await Bench(*arguments).run()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure a CURVE connection on loopback.")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    seconds = parser.parse_args().seconds
    keys, server_keys = KeyPair.generate(), KeyPair.generate()
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    other = spawn.Process(target=serve, args=(there, server_keys.secret, keys.public), daemon=True)
    other.start()
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        result = runner.run(_measure(here.recv(), keys, server_keys.public, seconds))
    other.join(10)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
