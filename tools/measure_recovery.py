"""How long every stream pauses after a process of a demo is killed, and in which phases.

    .venv/bin/python -m tools.measure_recovery --rounds 3

Starts a demo of its own in fp32. Each fault is a ``kill -9`` while greedy streams run at the
endpoints of all peers: of the worker of each stage in turn, and at the end, with ``--daemon``, of
the daemon of a joined PC. A stream's pause is the longest time without a piece of its answer from
the kill on; its text has to be that of an undisturbed one. Phases are those of ``/metrics`` (at the
PC where they took longest), ``noticed`` is from the kill until the first PC knew. ``untrue`` is for
how long ``/readyz`` said at some endpoint that it serves while its streams stood still.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from molink.errors import MolinkError
from molink.swarm.agent.recovery import RECOVERY_PHASES
from molinkd.cli.daemon_client import RunningDaemon, fetch_status, find_daemon
from molinkd.peer.home import Home

_QUESTION = [{"role": "user", "content": "What is molink?"}]
#: A fault comes once each stream has got so many pieces of its answer.
_PIECES_BEFORE = 10
_START_S = 300.0
_LOOK_S = 0.02


@dataclass(slots=True)
class Answer:
    """One stream: the pieces of its answer, and when each came."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    error: str = ""

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(piece for _, piece in self.pieces)

    def pause_after(self, when: float) -> float:
        """The longest time without a piece from ``when`` on."""
        times = [when, *(at for at, _ in self.pieces if at > when)]
        return max((after - before for before, after in pairwise(times)), default=0.0)


def main() -> int:
    """Print the result as JSON; exit code 1 if a text has changed or a stream has failed."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="molink-recovery-", ignore_cleanup_errors=True) as root:
        environment = {**os.environ, "MOLINK_HOME": root}
        command = [sys.executable, "-m", "molinkd", "demo", "--dtype", "f32"]
        with subprocess.Popen(command, env=environment, stdout=sys.stderr) as demo:
            try:
                faults = asyncio.run(_run(Home(Path(root)), options))
            finally:
                demo.terminate()
    pauses = sorted(pause for fault in faults for pause in fault["pauses"])
    result = {
        "streams": len(pauses),
        "pause_median_s": round(median(pauses), 2),
        "pause_p99_s": round(pauses[int(0.99 * (len(pauses) - 1))], 2),
        "pause_max_s": round(pauses[-1], 2),
        "ready_untrue_max_s": max(fault["untrue"] for fault in faults),
        "faults": faults,
    }
    print(json.dumps(result, indent=2))
    return 0 if all(fault["same_text"] == fault["streams"] for fault in faults) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="faults per stage")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--daemon", action="store_true", help="kill a joined PC's daemon at last")
    return parser.parse_args()


async def _run(home: Home, options: argparse.Namespace) -> list[dict[str, Any]]:
    await _until(lambda: find_daemon(home) is not None)
    found = find_daemon(home)
    assert found is not None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        status = await _settled(found, session)
        stages = range(len(status["pipelines"][0]["stages"]))
        reference = await _ask(session, found.endpoints[0], options.tokens, Answer())
        faults = []
        for fault in [*(stages for _ in range(options.rounds))]:
            for stage in fault:
                status = await _settled(found, session)
                workers = [
                    (worker["stage"], worker["pid"])
                    for peer in status["peers"]
                    for worker in peer["workers"]
                ]
                at, pid = sorted(workers)[stage % len(workers)]
                name = f"kill -9 of the worker of stage {at}"
                faults.append(await _fault(name, pid, session, found.endpoints, options))
        if options.daemon:
            status = await _settled(found, session)
            (pid, endpoint) = [
                (peer["daemon_pid"], peer["endpoint"])
                for peer in status["peers"]
                if peer["workers"] and peer["endpoint"] != found.run_file.endpoint
            ][-1]
            others = [each for each in found.endpoints if each != endpoint]
            faults.append(
                await _fault("kill -9 of a joined PC's daemon", pid, session, others, options)
            )
    for fault_ in faults:
        texts = fault_.pop("texts")
        fault_["same_text"] = sum(text == reference.text for text in texts)
    return faults


async def _fault(
    name: str,
    pid: int,
    session: aiohttp.ClientSession,
    endpoints: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Kill a process while streams run at ``endpoints``, and follow them to their ends."""
    answers = [Answer() for _ in range(options.streams)]
    tasks = [
        asyncio.create_task(
            _ask(session, endpoints[number % len(endpoints)], options.tokens, answer)
        )
        for number, answer in enumerate(answers)
    ]
    await _until(lambda: all(len(each.pieces) >= _PIECES_BEFORE or each.error for each in answers))
    watches = [asyncio.create_task(_not_ready(session, each)) for each in endpoints]
    killed, killed_at = time.monotonic(), time.time()
    psutil.Process(pid).kill()
    await asyncio.gather(*tasks)
    pauses = [each.pause_after(killed) for each in answers]
    untrue = []
    for number, watch in enumerate(watches):
        watch.cancel()
        paused = max(pauses[number :: len(endpoints)], default=0.0)
        told = [watch.result() - killed] if watch.done() else []
        untrue.append(min([paused, *told]))
    fault = {
        "fault": name,
        "streams": len(answers),
        "errors": [each.error for each in answers if each.error],
        "pauses": [round(pause, 2) for pause in pauses],
        "untrue": round(max(untrue), 2),
        "phases": await _phases(session, endpoints, killed_at),
    }
    print(json.dumps(fault), file=sys.stderr, flush=True)
    return {**fault, "texts": [each.text for each in answers]}


async def _not_ready(session: aiohttp.ClientSession, endpoint: str) -> float:
    """When an endpoint says that it can't serve, by the monotonic clock."""
    while True:
        async with session.get(f"{endpoint}/readyz") as response:
            if response.status != HTTPStatus.OK:
                return time.monotonic()
        await asyncio.sleep(_LOOK_S)


async def _ask(
    session: aiohttp.ClientSession, endpoint: str, tokens: int, answer: Answer
) -> Answer:
    body = {
        "messages": _QUESTION,
        "stream": True,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    try:
        async with session.post(f"{endpoint}/v1/chat/completions", json=body) as response:
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                answer.error = str(event.get("error", answer.error))
                for choice in event.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        answer.pieces.append((time.monotonic(), text))
    except aiohttp.ClientError as error:
        answer.error = repr(error)
    return answer


async def _phases(
    session: aiohttp.ClientSession, endpoints: Sequence[str], killed_at: float
) -> dict[str, float]:
    """Seconds of each phase, at the PC where it took longest."""
    figures = [await _metrics(session, endpoint) for endpoint in endpoints]
    noticed = [each["molink_recovery_noticed_timestamp_seconds"] - killed_at for each in figures]
    phases = {"noticed": min((each for each in noticed if each > 0), default=0.0)}
    for phase in RECOVERY_PHASES:
        phases[phase] = max(each[f"molink_recovery_last_{phase}_seconds"] for each in figures)
    return {phase: round(seconds, 3) for phase, seconds in phases.items()}


async def _metrics(session: aiohttp.ClientSession, endpoint: str) -> dict[str, float]:
    async with session.get(f"{endpoint}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in pairs}


async def _settled(found: RunningDaemon, session: aiohttp.ClientSession) -> dict[str, Any]:
    """The swarm's status once it serves, each stage is reported, and each spare is ready."""
    status: dict[str, Any] = {}

    def there() -> bool:
        try:
            status.update(fetch_status(found))
        except MolinkError:
            return False
        pipelines = [each for each in status["pipelines"] if each["ready"]]
        workers = sum(len(peer["workers"]) for peer in status["peers"])
        return bool(pipelines) and workers == len(pipelines[0]["stages"])

    while True:
        await _until(there)
        serving = [peer["endpoint"] for peer in status["peers"] if peer["workers"]]
        figures = [await _metrics(session, endpoint) for endpoint in serving]
        if all(each["molink_spare_workers"] for each in figures):
            return status
        await asyncio.sleep(_LOOK_S)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_START_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  other processes' states
            await asyncio.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
