"""Many clients of one endpoint, each with a stream of its own: is anyone kept waiting?

    python -m tools.bench_streams --scripted 20                    # no model: 20 tokens/s a stream
    python -m tools.bench_streams FOLDER --streams 300 --threads 1

Clients are connections of another process; all of them ask at once, and each checks that its stream
is complete: its last event, the reason, and as many tokens as it asked for. With ``--scripted`` the
endpoint runs in a process of its own, and a thread in it makes tokens at that rate, as many for
each stream; without, it is that of a whole swarm on this PC, whose stage computes what is sampled.

Shown are how late the endpoint's event loop was, by its own metric (``share`` is of looks that were
at most 20 ms late), and how long clients waited between two reads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molink.bench.report import percentile
from molink.checkpoint.model_source import find_demo_model
from molink.swarm.frontend.request import GeneratedToken, Request
from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import MetricValues, ServedModel
from molinkd.api.http_server import EndpointServer
from molinkd.api.prompt_worker_pool import PromptWorkers
from molinkd.peer.feed import TokenQueue
from molinkd.platform import child_options
from tools.serving.process import molink_swarm

_BUCKET = re.compile(r'molink_endpoint_loop_delay_seconds_bucket\{le="([^"]+)"\} (\S+)')
_LATE_S = 0.02


# --- an endpoint whose tokens cost nothing -----------------------------------------------------


class Scripted:
    """Implements :class:`molinkd.api.backend.Backend`: tokens at ``rate`` a second per stream.

    They come from another thread, those of all streams together, as from a ring.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._model = ServedModel("scripted", find_demo_model().path, 4096, 1700000000)
        self._lock = threading.Lock()
        self._live: dict[TokenQueue, deque[GeneratedToken]] = {}
        threading.Thread(target=self._make, name="ring", daemon=True).start()

    def models(self) -> Sequence[ServedModel]:
        """One."""
        return (self._model,)

    def ready(self, model: str | None = None) -> bool:
        """Always."""
        return True

    def metrics(self) -> MetricValues:
        """None."""
        return MetricValues()

    async def generate(self, request: Request) -> AsyncGenerator[GeneratedToken, None]:
        """Different tokens, the last with its reason."""
        feed, first, count = TokenQueue(), len(request.prompt), request.max_tokens
        tokens = deque(
            GeneratedToken(
                first + at, 300 + at % 1500, float("nan"), (), "length" if at + 1 == count else None
            )
            for at in range(count)
        )
        with self._lock:
            self._live[feed] = tokens
        try:
            while True:
                for item in await feed.get_all():
                    assert isinstance(item, GeneratedToken)
                    yield item
                    if item.finish_reason is not None:
                        return
        finally:
            with self._lock:
                self._live.pop(feed, None)

    def _make(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + 1 / self._rate, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            with self._lock:
                live = list(self._live.items())
            for feed, tokens in live:
                if tokens:
                    feed.put(tokens.popleft())


def serve_scripted(rate: float) -> None:
    """Until its standard input ends."""
    server = EndpointServer(Scripted(rate), ApiSettings(), PromptWorkers(child_options()))
    print(f"http://127.0.0.1:{server.start(0)}", flush=True)
    sys.stdin.read()
    server.stop()


@contextlib.contextmanager
def scripted_endpoint(rate: float) -> Iterator[str]:
    """Its URL."""
    command = [sys.executable, "-m", "tools.bench_streams", "--serve", "--scripted", str(rate)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


# --- clients -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What one client saw of its stream."""

    first_s: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0
    complete: bool = False


async def stream(url: str, index: int, tokens: int) -> Seen:
    """One stream over a connection of its own, read as bytes: clients should cost little."""
    body = {
        "prompt": f"This is stream {index} of many. ",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    seen, sent = Seen(), time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data))
    writer.write(data)
    end, before = bytearray(), sent
    while chunk := await reader.read(1 << 16):
        now = time.perf_counter()
        if not seen.first_s:
            seen.first_s = now - sent
        else:
            seen.longest_s = max(seen.longest_s, now - before)
        before = now
        end = (end + chunk)[-4096:]
    seen.last_s = before - sent
    writer.close()
    whole = b'"finish_reason":"length"' in end and b'"completion_tokens":%d' % tokens in end
    seen.complete = whole and b"data: [DONE]\n\n" in end
    return seen


async def clients(url: str, streams: int, tokens: int) -> list[Seen]:
    """All at once."""
    return await asyncio.gather(*(stream(url, index, tokens) for index in range(streams)))


def told(url: str, streams: int, tokens: int) -> dict[str, Any]:
    """What they saw, in one object."""
    began = time.perf_counter()
    seen = asyncio.run(clients(url, streams, tokens))
    seconds = time.perf_counter() - began
    longest, first = (sorted(getattr(s, name) for s in seen) for name in ("longest_s", "first_s"))
    return {
        "streams": streams,
        "complete": sum(one.complete for one in seen),
        "tokens": tokens,
        "tokens/s": round(streams * tokens / seconds, 1),
        "first p50 s": round(percentile(first, 50), 3),
        "longest pause p50 s": round(percentile(longest, 50), 3),
        "longest pause p99 s": round(percentile(longest, 99), 3),
    }


# --- the loop ----------------------------------------------------------------------------------


def looks(url: str) -> dict[float, float]:
    """How many looks at the loop were at most so many seconds late."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {float(bound): float(count) for bound, count in _BUCKET.findall(text)}


def delays(before: dict[float, float], after: dict[float, float]) -> dict[str, Any]:
    """Of the looks between two: how many, the 99th percentile's bound, and the share in time."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    total = counts[float("inf")]
    p99 = min(bound for bound, count in counts.items() if count >= 0.99 * total)
    return {
        "looks": int(total),
        "delay p99 ms at most": round(1000 * p99, 1),
        "share": round(counts[_LATE_S] / total, 4),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="folder of a model")
    parser.add_argument("--scripted", type=float, help="tokens/s of each stream, without a model")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the stage")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_scripted(options.scripted)
        return
    if options.ask:
        print(json.dumps(told(options.ask, options.streams, options.tokens)))
        return
    if options.scripted:
        endpoint = scripted_endpoint(options.scripted)
    else:
        os.environ["MOLINK_MAX_NUM_SEQS"] = str(options.max_running)
        endpoint = molink_swarm(options.model, 1, threads=options.threads)
    with endpoint as url:
        for number in range(options.rounds + 1):
            streams, tokens = (options.streams, options.tokens) if number else (4, 8)
            command = [sys.executable, "-m", "tools.bench_streams", "--ask", url]
            command += ["--streams", str(streams), "--tokens", str(tokens)]
            before = looks(url)
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            if number:  # the first one warms up
                print(json.dumps({**found, **delays(before, looks(url))}), flush=True)


if __name__ == "__main__":
    main()
