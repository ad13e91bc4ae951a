"""Statuses of swarms for the screens of ``molink top``."""

from typing import Any

import msgspec

from molink.swarm.controller.status_schema import SwarmStatus, decode_status

GB = 10**9


def decode(status: dict[str, Any]) -> SwarmStatus:
    """A status as a client of the daemon decodes it."""
    return decode_status(msgspec.json.encode(status))


def stage_of(number: int, layers: list[int], **changes: Any) -> dict[str, Any]:
    """A worker's entry."""
    queues = {"decode": {"queued": 0, "in_flight": 1200}, "bulk": {"queued": 64000, "in_flight": 0}}
    load = {
        "busy": 34 + number,
        "bubbles": 12,
        "requests": 2,
        "weights": 3 * GB,
        "kv": GB,
        "link": {"latency_s": 0.015 * (number + 1), "rate": 11_750_000.0 / (number + 1), **queues},
    }
    return {
        "pid": 1,
        "pipeline": "p1",
        "stage": number,
        "layers": layers,
        "state": "ready",
        "load": load,
        **changes,
    }


def peer(number: int, name: str, *workers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A peer's entry."""
    return {
        "id": f"{number:016x}",
        "name": name,
        "state": "online",
        "device": "cuda 0: NVIDIA GeForce RTX 3060",
        "memory": 12 * GB,
        "reason": "",
        "workers": list(workers),
        **changes,
    }


def request(owner: int, state: str, **changes: int | float) -> dict[str, Any]:
    """A request's entry."""
    return {"peer": f"{owner:016x}", "state": state, "prompt": 215, "age_s": 3, **changes}


def ring(names: list[str], layers: int = 24, **pipeline: Any) -> dict[str, Any]:
    """A ring of the named PCs, with one stage each and two requests."""
    each = layers // len(names)
    ranges = [[each * i, each * (i + 1)] for i in range(len(names))]
    peers = [peer(i, name, stage_of(i, ranges[i])) for i, name in enumerate(names)]
    stages = [
        {
            "peer": one["id"],
            "layers": ranges[i],
            "device": one["device"],
            "decode_s": 0.0021,
        }
        for i, one in enumerate(peers)
    ]
    scheduler = {
        "running": 2,
        "waiting": 1,
        "blocks": 800,
        "used": 12,
        "micro_batches": 3,
        "requests": [
            request(0, "decode", computed=260, generated=45, tokens_per_s=21.4, age_s=9),
            request(1, "prefill", computed=100, prompt=1000),
            request(0, "waiting", age_s=1),
        ],
    }
    return {
        "swarm": "home",
        "coordinator": {"state": "running"},
        "model": "qwen3-8b",
        "peers": peers,
        "pipelines": [
            {
                "id": "p1",
                "epoch": 3,
                "ready": True,
                "stages": stages,
                "scheduler": scheduler,
                **pipeline,
            }
        ],
        "story": ["100.0 epoch 3: alice 1-8, bob 9-16", "112.5 epoch 3 is ready"],
        "events": ["100.0 attic is offline", "112.5 layers of m moved: alice 1-8, bob 9-16"],
        "clock": 120.0,
    }


def serving() -> dict[str, Any]:
    """Three PCs serve; a fourth has no stage, and a fifth is offline."""
    status = ring(["alice", "bob", "carol"])
    copy = {"bytes": 12 * 10**8, "total": 4 * GB, "from": "alice", "copy": True}
    status["peers"] += [
        peer(7, "laptop", transfers=[copy], device="cpu: Intel i5"),
        peer(8, "attic", state="offline", device="", memory=0),
    ]
    return status


def several() -> dict[str, Any]:
    """Two models; one has two pipelines, one of which waits for a PC."""
    first = ring(["alice", "bob"], model="qwen3-8b")
    second = ring(["dora"], id="p2", model="llama-3b")
    (other,) = second["pipelines"]
    other["stages"][0]["peer"] = f"{5:016x}"
    worker = {**second["peers"][0]["workers"][0], "pipeline": "p2"}
    waiting = {
        "id": "p3",
        "model": "llama-3b",
        "epoch": 3,
        "ready": False,
        "reason": "no peer offers to run layers",
        "stages": [],
    }
    return {
        **first,
        "models": [{"name": "qwen3-8b"}, {"name": "llama-3b"}],
        "peers": [*first["peers"], peer(5, "dora", worker)],
        "pipelines": [*first["pipelines"], other, waiting],
    }


def loading() -> dict[str, Any]:
    """One stage fetches its files, another loads."""
    status = ring(["alice", "bob"], ready=False, reason="loading the model", scheduler=None)
    fetching = {"state": "fetching", "fetching": {"done": 340 * 10**6, "total": GB}}
    for index, how in enumerate((fetching, {"state": "loading"})):
        status["peers"][index]["workers"][0] |= {"load": None, **how}
    coming = {"bytes": 340 * 10**6, "total": GB, "rate": 10**7, "eta_s": 66.0, "from": "bob"}
    status["peers"][0]["transfers"] = [coming]
    return status


def not_ready() -> dict[str, Any]:
    """No placement, and one peer is left out."""
    reason = "waiting for peers: 1 of 3 with a stage are there"
    pipeline = {"id": "p1", "epoch": 0, "ready": False, "reason": reason, "stages": []}
    why = "left out: its stage failed 3 times, the last time with: no memory on cuda:0 for 120 KV "
    why += "blocks (3840 MiB) besides 7000 MiB of weights; let this peer use less memory"
    peers = [peer(0, "alice"), peer(1, "bob", reason=why)]
    return {**ring(["alice"]), "peers": peers, "pipelines": [pipeline]}


def pairing() -> dict[str, Any]:
    """Two PCs want to join; one imitates another."""
    pairings = [
        {"name": "den", "code": "482-913", "address": "192.168.1.23", "since": 1.0},
        {"name": "[b]alice[/b]\x1b[1m" * 9, "code": "111-222", "address": "192.168.1.66"},
    ]
    return {**alone(), "pairing_requests": pairings}


def alone() -> dict[str, Any]:
    """One PC is the whole ring."""
    return ring(["alice"])


def sixteen() -> dict[str, Any]:
    """Sixteen PCs: more than fit on a screen."""
    return ring([f"pc-{number:02d}" for number in range(16)], layers=64)


def long_names() -> dict[str, Any]:
    """Names of maximum length, some with wide characters."""
    status = ring(["A" * 256, "ノートパソコン" * 20, "carol"])
    return {**status, "swarm": "s" * 256, "model": "m" * 256, "files": "Only " + "A " * 120}


def hostile() -> dict[str, Any]:
    """Names and reasons with control sequences and markup."""
    evil = "[red]x[/red]\x1b[2J\x07\r\n\u202e\u200b[@click=app.quit]q[/]"
    status = ring([evil, "[/]", "$accent"], reason=evil)
    banned_peers = [{"name": evil, "banned_by": "this PC's control socket", "reason": evil}]
    return {**status, "swarm": evil, "model": evil, "events": [evil, f"1.0 {evil}"]} | {
        "files": evil,
        "banned_peers": banned_peers,
    }
