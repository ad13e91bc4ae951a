"""Rings over the WAN rig for :mod:`tools.bench_plan`: what was predicted of each, and measured."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from molink.bench.planned_requests import PlannedRequest
from molink.sim.profiles import LinkProfile
from molink.sim.swarm_plan import ModelDescription, SwarmPlan, plan_swarm
from molink.swarm.placement.placement import PlacementGoal
from molinkd.peer.agent.link_rates import POLL_INTERVAL_S
from tools.emulation.drive import Driven, Spec
from tools.emulation.model import Emulation
from tools.emulation.ring import Host, RingSettings
from tools.serving.process import ENDPOINT, wait_for
from tools.wan import Node, Rig, RigError
from tools.wan.namespaces import enter

ROOT = Path(__file__).resolve().parents[1]
#: Before the first request: links are being tried out.
_WARMUP_S = 3.0
START_S = 300.0
#: Tokens of a prompt whose rows are enough to tell a link's rate.
_MANY = 256
#: What would use links and cores beside the ring.
_QUIET = "copies = false\nspare_worker = false\ndiscovery = false\n"


@dataclass(frozen=True, slots=True)
class Link:
    """What each PC has for a connection; ``delay_ms`` one way."""

    mbps: float
    delay_ms: float


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests of one run, one after another; and TCP's congestion control."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    congestion: str


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds per token: as predicted, and of each request."""

    predicted: float
    measured: tuple[float, ...]


# --- PCs of data sheets -------------------------------------------------------------------------


def described(
    devices: Sequence[str], model: str, link: Link, asked: Asked, recorded: Path, seed: int
) -> Run:
    """A ring of emulated stages, as ``molink plan`` places them on those devices.

    Raises:
        RigError: a process of it failed.
    """
    planned = plan_swarm(
        ModelDescription.from_profile(model),
        devices,
        LinkProfile(link.mbps, link.delay_ms),
        PlacementGoal(min_stages=len(devices)),
        streams=1,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
    )
    forecast, stages = planned.forecast, planned.stages
    nodes = [Node(f"pc{n}", link.mbps, link.mbps, link.delay_ms) for n in range(len(stages))]
    each = 1.0 + 2 * (forecast.ttft_s + asked.output_tokens * forecast.tpot_s)
    plan = tuple(
        PlannedRequest(n, _WARMUP_S + n * each, asked.prompt_tokens, asked.output_tokens)
        for n in range(asked.requests)
    )
    with Rig(nodes, congestion=asked.congestion, seed=seed) as rig:
        hosts = tuple(
            Host(rig.address(n), tuple(enter(rig.namespace(n)))) for n in range(len(stages))
        )
        settings = RingSettings("adaptive", True, "lossless", 0, max_num_batched_tokens=0)
        until = _WARMUP_S + 3 * each * len(plan) + 60
        spec = Spec(_emulation(planned, model, recorded), settings, hosts, plan, until, seed)
        driven = _drive(rig, spec)
    errors = [sample.error for sample in driven.samples if sample.error is not None]
    if errors or driven.trouble:
        raise RigError(f"the ring failed: {errors or driven.trouble}")
    return Run(forecast.tpot_s, tuple(one.tpot for one in driven.samples if one.tpot is not None))


def _emulation(planned: SwarmPlan, model: str, recorded: Path) -> Emulation:
    return Emulation(
        activations=str(recorded.resolve()),
        stages=len(planned.stages),
        model=model,
        devices=tuple(stage.device for stage in planned.stages),
        layers=tuple(stage.layers[1] - stage.layers[0] for stage in planned.stages),
    )


def _drive(rig: Rig, spec: Spec) -> Driven:
    with tempfile.TemporaryDirectory(prefix="molink-plan-") as folder:
        asked, answered = Path(folder) / "spec.json", Path(folder) / "result.json"
        asked.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "tools.emulation.drive", str(asked), str(answered)]
        process = rig.run(0, command, cwd=ROOT)
        if process.wait(spec.until + 300) != 0:
            raise RigError("a ring failed; see above")
        return msgspec.json.decode(answered.read_bytes(), type=Driven)


# --- the whole product --------------------------------------------------------------------------


def daemons(model: Path, stages: int, links: Sequence[Link], asked: Asked) -> list[Run]:
    """A swarm of as many daemons, over each of ``links``, which differ in their rates only.

    Files are fetched and stages loaded before the rates are limited.

    Raises:
        RigError: a process of it failed, or isn't ready in time.
    """
    nodes = [Node(f"pc{n}", 0.0, 0.0, links[0].delay_ms) for n in range(stages)]
    with (
        tempfile.TemporaryDirectory(prefix="molink-plan-") as base,
        Rig(nodes, congestion=asked.congestion) as rig,
        _swarm(rig, model, Path(base), stages) as (home, url),
    ):
        return [_measured(rig, link, home, url, asked) for link in links]


def _measured(rig: Rig, link: Link, home: Path, url: str, asked: Asked) -> Run:
    for index in range(len(rig.nodes)):
        rig.change(index, up_mbps=link.mbps, down_mbps=link.mbps)
    sizes = [str(asked.prompt_tokens), str(asked.output_tokens)]
    command = [sys.executable, "-m", "tools.plan_client", url]
    # The links' senders learn of their rates, and tell them to the coordinator.
    _said(rig, home, [*command, "2", str(_MANY), "8"])
    time.sleep(POLL_INTERVAL_S + _WARMUP_S)
    measured = _said(rig, home, [*command, str(asked.requests), *sizes])
    plan = _said(rig, home, [sys.executable, "-m", "molinkd", "plan", "--live", "--json"])
    return Run(plan["turn_s"], tuple(measured))


def _said(rig: Rig, home: Path, command: Sequence[str]) -> Any:
    """What a program on the first node prints as JSON."""
    return json.loads(_printed(rig, home, command))


def _invitation(rig: Rig, home: Path) -> str:
    return _printed(rig, home, [sys.executable, "-m", "molinkd", "invite"]).decode().strip()


def _printed(rig: Rig, home: Path, command: Sequence[str]) -> bytes:
    process = rig.run(0, command, env=_environment(home), cwd=ROOT, stdout=subprocess.PIPE)
    printed: bytes = process.communicate(timeout=START_S)[0]
    if process.returncode != 0:
        raise RigError(f"{' '.join(command[2:])} failed; see above")
    return printed


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "MOLINK_HOME": str(home), "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def _swarm(rig: Rig, model: Path, base: Path, stages: int) -> Iterator[tuple[Path, str]]:
    """Daemons that serve; the first one's home and endpoint."""
    token, url, started = "", "", []
    try:
        for index in range(stages):
            home = base / f"pc{index}"
            home.mkdir()
            (home / "config.toml").write_text(_QUIET, encoding="utf-8")
            if index:
                token = _invitation(rig, base / "pc0")
            verb = ["join", token] if index else ["up", "--model", str(model.resolve())]
            more = [] if index else ["--min-peers", str(stages)]
            command = [sys.executable, "-m", "molinkd", *verb, *more]
            command += ["--host", rig.address(index), "--threads", "1"]
            log = base / f"pc{index}.log"
            with log.open("wb") as output:
                process = rig.run(
                    index,
                    command,
                    env=_environment(home),
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            started.append(process)
            if not index:
                url = f"http://127.0.0.1:{wait_for(log, ENDPOINT, process)}"
        _said(rig, base / "pc0", [sys.executable, "-m", "tools.plan_client", url, "1", "4", "2"])
        yield base / "pc0", url
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
