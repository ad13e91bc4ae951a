"""``python -m tools.evening.requests``: whoever asks PC 0 all evening, on its node of the rig.

A line of JSON on stdin is an :class:`Order`. Requests come at random times (Poisson), whatever has
become of those before. Meanwhile the swarm's status is looked at. At the end all of it is printed,
as :class:`PeerAnsweredEvent`.
"""

import asyncio
import random
import sys
import time
from pathlib import Path

import aiohttp
import msgspec

from molink.bench.sample import Sample
from molink.errors import MolinkError
from molinkd.cli.daemon_client import fetch_status, require_daemon
from tools.serving.client import complete, make_prompt

#: Between two looks at the status, in seconds.
LOOK_S = 1.0
#: How long answers are waited for after the last request, in seconds.
_END_S = 60.0


class Order(msgspec.Struct, frozen=True):
    """Requests of the daemon with that home: ``rate`` a second, from ``begin`` to ``end``.

    Times are those of this PC's monotonic clock. Prompts have a quarter of ``prompt_tokens`` to
    twice as many.
    """

    home: str
    url: str
    begin: float
    end: float
    rate: float
    prompt_tokens: int
    output_tokens: int
    seed: int = 0


class Look(msgspec.Struct, frozen=True):
    """What the swarm was at a moment: ``ring`` has each stage's PC and layers; empty: none."""

    at: float
    ring: tuple[tuple[str, int, int], ...] = ()
    micro_batches: int = 0
    epoch: str = ""


class Answered(msgspec.Struct, frozen=True):
    """What came of it, by the clock of the order; ``story`` is the swarm's own."""

    samples: tuple[Sample, ...]
    looks: tuple[Look, ...]
    story: tuple[str, ...] = ()


# --- of `molink status` --------------------------------------------------------------------------


class _Stage(msgspec.Struct):
    peer: str
    layers: tuple[int, int]


class _Head(msgspec.Struct):
    micro_batches: int


class _Pipeline(msgspec.Struct):
    ready: bool
    epoch: int | str
    stages: list[_Stage] = []
    head: _Head | None = None


class _Peer(msgspec.Struct):
    id: str
    name: str


class _Status(msgspec.Struct):
    peers: list[_Peer]
    pipelines: list[_Pipeline]
    story: list[str] = []


def _now() -> float:
    return time.perf_counter()


async def _ask(session: aiohttp.ClientSession, order: Order, at: float, prompt: str) -> Sample:
    await asyncio.sleep(at - _now())
    sent = _now()
    try:
        return await complete(session, order.url, prompt, order.output_tokens)
    except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
        return Sample(sent, finished_at=_now(), error=str(error) or repr(error))


async def _look(order: Order, looks: list[Look], story: dict[str, None]) -> None:
    found = require_daemon(Path(order.home))
    while True:
        try:
            status = msgspec.convert(await asyncio.to_thread(fetch_status, found), _Status)
        except MolinkError:
            looks.append(Look(_now()))
        else:
            looks.append(_seen(status))
            story.update(dict.fromkeys(status.story))
        await asyncio.sleep(LOOK_S)


def _seen(status: _Status) -> Look:
    names = {peer.id: peer.name for peer in status.peers}
    for one in status.pipelines:
        if one.ready:
            ring = tuple((names[stage.peer], *stage.layers) for stage in one.stages)
            return Look(_now(), ring, one.head.micro_batches if one.head else 0, str(one.epoch))
    return Look(_now())


async def ask_all(order: Order) -> Answered:
    """Send all requests, and wait for their answers."""
    chance = random.Random(order.seed)
    at = order.begin + chance.expovariate(order.rate)
    prompts: list[tuple[float, str]] = []
    while at < order.end:
        tokens = chance.randint(order.prompt_tokens // 4, 2 * order.prompt_tokens)
        prompts.append((at, make_prompt(tokens, 1000 * order.seed + len(prompts))))
        at += chance.expovariate(order.rate)
    looks: list[Look] = []
    story: dict[str, None] = {}
    looking = asyncio.create_task(_look(order, looks, story))
    limit = aiohttp.ClientTimeout(total=order.end - order.begin + _END_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
        asked = (_ask(session, order, at, prompt) for at, prompt in prompts)
        samples = await asyncio.gather(*asked)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    return Answered(tuple(samples), tuple(looks), tuple(story))


def main() -> None:
    """Ask."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(ask_all(order))))


if __name__ == "__main__":
    main()
