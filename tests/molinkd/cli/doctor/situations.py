"""Facts of PCs as ``molink doctor`` may find them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from molinkd.cli.doctor.facts import (
    DeviceFacts,
    DoctorFacts,
    HostFacts,
    NetworkFacts,
    PeerFact,
    SwarmFacts,
)
from molinkd.peer.agent.kernel_self_test import KernelResult, SelfTestResult, TorchGpu, TorchInfo

FINE = (
    KernelResult(kernel="torch", dtype="f16", state="ok", error=1e-4, tolerance=2e-3),
    KernelResult(kernel="int8", dtype="f16", state="ok", error=1e-4, tolerance=2e-3),
    KernelResult(kernel="nf4", dtype="f16", state="absent"),
)
CPU_BUILD = TorchInfo(torch="2.13.0+cpu")
CUDA_BUILD = TorchInfo(torch="2.13.0+cu130", cuda="13.0")
RTX = TorchGpu(name="NVIDIA GeForce RTX 3060", capability="8.6")
WORKING = TorchInfo(
    torch="2.13.0+cu130", cuda="13.0", gpus=(RTX,), kernels_for=("sm_80", "sm_90", "compute_90")
)


def device(about: TorchInfo | None = CPU_BUILD, **changes: Any) -> DeviceFacts:
    results = changes.pop("results", FINE)
    failure = changes.pop("failure", "")
    where = changes.pop("where", "cpu")
    test = SelfTestResult(about=about, device=where, name="a CPU", results=results, failure=failure)
    return DeviceFacts(system=changes.pop("system", "linux"), test=test, **changes)


def network(**changes: Any) -> NetworkFacts:
    usual = NetworkFacts(
        system="linux", addresses=("192.168.1.7",), interfaces=("192.168.1.7",), announced_swarms=()
    )
    return replace(usual, **changes)


def swarm(**changes: Any) -> SwarmFacts:
    peers = (
        PeerFact("a" * 16, "desk", "0.1.0", "192.168.1.7"),
        PeerFact("b" * 16, "couch", "0.1.0", "192.168.1.8"),
        PeerFact("c" * 16, "attic", "0.1.0", "203.0.113.5"),
    )
    usual = SwarmFacts(
        id="5" * 16, own_id="a" * 16, leader="b" * 16, peers=peers, clock_offset_s=0.2
    )
    return replace(usual, **changes)


def host(**changes: Any) -> HostFacts:
    usual = HostFacts(
        system="linux",
        home=Path("/home/me/molink"),
        user="me",
        free_bytes=100 << 30,
        version="0.1.0",
    )
    return replace(usual, **changes)


def facts(**changes: Any) -> DoctorFacts:
    return replace(DoctorFacts(device=device(), network=network(), host=host()), **changes)
