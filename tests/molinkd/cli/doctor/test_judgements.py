"""Each thing that ``molink doctor`` can say, by the facts that make it say so."""

from typing import Any

import pytest

from molinkd.cli.doctor.device_checks import check_device
from molinkd.cli.doctor.facts import Finding, NvidiaCard, PeerFact, PortFact
from molinkd.cli.doctor.host_checks import check_host
from molinkd.cli.doctor.network_checks import check_network
from molinkd.peer.agent.kernel_self_test import KernelResult, TorchGpu, TorchInfo
from tests.molinkd.cli.doctor.situations import (
    CPU_BUILD,
    CUDA_BUILD,
    WORKING,
    device,
    network,
    place,
    swarm,
)

A, B, C = "a" * 16, "b" * 16, "c" * 16
CARD = NvidiaCard(names=("NVIDIA GeForce RTX 3060",), driver="550.54", cuda="12.4")
NEW = NvidiaCard(names=CARD.names, driver="580.65", cuda="13.0")
MIRRORED = 'Add-Content "$env:USERPROFILE\\.wslconfig" "[wsl2]`nnetworkingMode=mirrored"'


def of(findings: list[Finding], check: str) -> Finding:
    (found,) = [one for one in findings if one.check == check]
    return found


def expect(found: Finding, level: str, text: str, command: str | None = None) -> None:
    assert found.level == level, found
    assert text in found.text, found
    if command is None:
        assert found.commands == (), found
    else:
        assert command in "\n".join(found.commands), found


# --- torch, the GPU, kernels ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "level", "text", "command"),
    [
        (device(), "ok", "torch 2.13.0+cpu (the CPU build)", None),
        (device(WORKING), "ok", "torch 2.13.0+cu130 (for CUDA 13.0)", None),
        (
            device(card=CARD),
            "problem",
            "the GPU of this PC (NVIDIA GeForce RTX 3060) is not used",
            "./install.sh --cuda",
        ),
        (device(on_bus=True), "problem", "(an NVIDIA card) is not used", "./install.sh --cuda"),
        (
            device(card=CARD, system="win32"),
            "problem",
            "is not used",
            "powershell -ExecutionPolicy Bypass -File install.ps1 --cuda",
        ),
        (device(card=CARD, wanted="cpu"), "ok", "the CPU build", None),
        (
            device(None, failure="ModuleNotFoundError: No module named 'torch'"),
            "problem",
            "this PC can hold no layers: ModuleNotFoundError",
            "./install.sh",
        ),
        (
            device(None, failure="OSError: [WinError 126] c10.dll", system="win32"),
            "problem",
            "WinError 126",
            "winget install Microsoft.VCRedist.2015+.x64",
        ),
        (device(None), "problem", "it says nothing", "./install.sh"),
    ],
)
def test_torch(facts: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_device(facts), "torch"), level, text, command)


def gpu(**changes: Any) -> TorchInfo:
    return TorchInfo(torch="2", cuda="13.0", **changes)


PASCAL = TorchGpu(name="GTX 1080", capability="6.1")


@pytest.mark.parametrize(
    ("facts", "level", "text", "command"),
    [
        (device(WORKING), "ok", "torch uses NVIDIA GeForce RTX 3060", None),
        (device(CUDA_BUILD), "ok", "no NVIDIA card was found", None),
        (device(CUDA_BUILD, on_bus=False), "ok", "no NVIDIA card was found", None),
        (
            device(CUDA_BUILD, on_bus=True),
            "problem",
            "its driver is not installed",
            "sudo ubuntu-drivers install && sudo reboot",
        ),
        (
            device(CUDA_BUILD, on_bus=True, system="win32"),
            "problem",
            "its driver is not installed",
            "start https://www.nvidia.com/drivers",
        ),
        (
            device(CUDA_BUILD, card=CARD),
            "problem",
            "the driver 550.54 is for CUDA 12.4 at most, and torch was built for 13.0",
            "sudo ubuntu-drivers install && sudo reboot  # not Ubuntu: https://www.nvidia.com/drivers"
            "\n.venv/bin/python -m pip uninstall -y torch && ./install.sh --cuda",
        ),
        (
            device(CUDA_BUILD, card=CARD, system="win32"),
            "problem",
            "the GPU can't be used",
            ".venv\\Scripts\\python -m pip uninstall -y torch; powershell -Exec",
        ),
        (
            device(
                CUDA_BUILD, card=NvidiaCard(error="couldn't communicate with the NVIDIA driver")
            ),
            "problem",
            "the driver does not answer: couldn't communicate",
            "sudo reboot",
        ),
        (
            device(gpu(reason="CUDA unknown error"), card=NEW),
            "problem",
            "torch can't use the GPU: CUDA unknown error",
            "nvidia-smi",
        ),
        (device(gpu(), card=NEW), "problem", "is CUDA_VISIBLE_DEVICES set?", "nvidia-smi"),
        (
            device(gpu(), card=NvidiaCard(), system="win32"),
            "problem",
            "can't use",
            "Restart-Computer",
        ),
        (
            device(gpu(gpus=(PASCAL,), kernels_for=("sm_75", "sm_86"))),
            "problem",
            "no code for GTX 1080 (compute capability 6.1; it has sm_75, sm_86)",
            "molink up --device cpu",
        ),
        (device(gpu(gpus=(PASCAL,), kernels_for=())), "ok", "torch uses GTX 1080", None),
        (device(gpu(gpus=(PASCAL,), kernels_for=("sm_60",))), "ok", "torch uses GTX 1080", None),
        (device(gpu(gpus=(PASCAL,), kernels_for=("x", "sm_62"))), "problem", "no code", "cpu"),
        (device(gpu(gpus=(PASCAL,), kernels_for=("compute_50",))), "ok", "GTX 1080", None),
    ],
)
def test_the_gpu(facts: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_device(facts), "gpu"), level, text, command)


def test_no_gpu_is_judged_where_none_is_wanted() -> None:
    for facts in (device(CPU_BUILD), device(WORKING, wanted="cpu")):
        assert [one.check for one in check_device(facts)] == ["torch", "kernels"]


def failed(kernel: str, **changes: Any) -> KernelResult:
    given = {"dtype": "bf16", "error": 0.3, "tolerance": 0.03, **changes}
    return KernelResult(kernel=kernel, state="wrong", **given)


@pytest.mark.parametrize(
    ("facts", "level", "text", "command"),
    [
        (device(), "ok", "2 kernels of cpu (a CPU) compute what plain torch does", None),
        (
            device(results=(failed("compiled-attention"), failed("compiled-attention"))),
            "warning",
            "compiled-attention (bf16) is off by 0.3 (0.03 is allowed). Workers don't use it from "
            "their next start on, but (compiled-attention: gather-attention)",
            "molink down",
        ),
        (
            device(results=(failed("int8", error=None, reason="signal 4"),)),
            "warning",
            "int8 (bf16) fails: signal 4. Workers",
            "molink up  # or: molink join",
        ),
        (
            device(results=(failed("torch"), failed("int8"))),
            "problem",
            "nothing can take the place of torch: torch (bf16) is off by 0.3",
            "molink up --stage none",
        ),
        (device(failure="no memory"), "problem", "of cpu failed: no memory", "molink doctor"),
    ],
)
def test_kernels(facts: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_device(facts), "kernels"), level, text, command)


def test_a_gpu_that_computes_wrongly_leaves_the_cpu() -> None:
    results = failed("gather-attention"), failed("plain-attention")
    facts = device(WORKING, results=results, where="cuda:0")
    found = of(check_device(facts), "kernels")
    expect(found, "problem", "nothing can take the place of plain-attention", "--device cpu")


def test_what_is_wrong_but_not_needed_is_no_problem() -> None:
    facts = device(WORKING, results=(failed("plain-attention"), failed("unpacked")), where="cuda:0")
    expect(of(check_device(facts), "kernels"), "ok", "compute what plain torch does")


# --- the network ------------------------------------------------------------------------------


def port(number: int, setting: str = "control_port", **changes: Any) -> PortFact:
    return PortFact(setting, number, **changes)


@pytest.mark.parametrize(
    ("facts", "daemon", "level", "text", "command"),
    [
        (network(), 0, "ok", "the ports that molink listens on are free", None),
        (network(), 42, "ok", "molink runs here (process 42) and has its ports", None),
        (
            network(ports=(port(5467, taken="nc (process 9)"),)),
            0,
            "warning",
            "port 5467 (`control_port`) in use by nc (process 9): molink takes the next free port",
            "molink up --control-port 5567",
        ),
        (
            network(ports=(port(5468, "worker_ports", taken="nc"), port(5469, "worker_ports"))),
            0,
            "ok",
            "are free",
            None,
        ),
        (
            network(ports=(port(5468, "worker_ports", taken="nc"),)),
            0,
            "problem",
            "all ports for stages, 5468 to 5479, are in use; nc has one",
            "molink down",
        ),
        (
            network(ports=(port(80, taken="Permission denied", refused=True),)),
            0,
            "problem",
            "port 80 (`control_port`) can't be listened on: Permission denied",
            "molink up --control-port 0",
        ),
        (
            network(system="win32", ports=(port(5467, taken="WinError 10013", refused=True),)),
            0,
            "problem",
            "Windows keeps port 5467 (`control_port`) from programs (WinError 10013)",
            "netsh interface ipv4 show excludedportrange protocol=tcp",
        ),
    ],
)
def test_ports(facts: Any, daemon: int, level: str, text: str, command: str | None) -> None:
    expect(of(check_network(facts, None, daemon), "ports"), level, text, command)


CLOSED = ((B, A),)


@pytest.mark.parametrize(
    ("facts", "known", "level", "text", "command"),
    [
        (network(), None, "ok", "none was seen on this PC", None),
        (network(firewall="x", rule=True), None, "ok", "it has a rule for molink", None),
        (
            network(firewall="ufw"),
            None,
            "warning",
            "a firewall (ufw) runs here, and no other PC has tried to connect yet",
            "sudo ufw allow 5466:5482/tcp && sudo ufw allow 5353/udp",
        ),
        (
            network(firewall="firewalld", discovery=False, worker_ports=(6000, 6001)),
            None,
            "warning",
            "a firewall (firewalld)",
            "sudo firewall-cmd --add-port=5466-5482/tcp --add-port=6000-6001/tcp",
        ),
        (network(firewall="ufw"), swarm(), "ok", "no other PC of the swarm has failed", None),
        (
            network(firewall="ufw"),
            swarm(closed=CLOSED),
            "problem",
            "couch can't connect to this PC at port 5467: its firewall (ufw) keeps others out",
            "sudo ufw allow 5466:5482/tcp",
        ),
        (network(), swarm(closed=CLOSED), "problem", "a firewall keeps others out", "sudo ufw"),
        (
            network(system="win32", firewall="Windows Defender Firewall", rule=False),
            swarm(closed=CLOSED),
            "problem",
            "its firewall (Windows Defender Firewall)",
            "New-NetFirewallRule -DisplayName molink -Direction Inbound -Protocol TCP -LocalPort "
            "5466-5482 -Action Allow  # in PowerShell as administrator\n"
            "New-NetFirewallRule -DisplayName molink -Direction Inbound -Protocol UDP -LocalPort "
            "5353 -Action Allow",
        ),
        (
            network(),
            swarm(closed=((A, C),)),
            "warning",
            "this PC can't connect to attic: run `molink doctor` there",
            None,
        ),
    ],
)
def test_the_firewall(facts: Any, known: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_network(facts, known, 0), "firewall"), level, text, command)


@pytest.mark.parametrize(
    ("facts", "known", "level", "text", "command"),
    [
        (network(), None, "ok", "192.168.1.7 is an address of the local network", None),
        (
            network(addresses=("10.0.0.4", "8.8.8.8")),
            None,
            "ok",
            "this PC has a public address: 8.8.8.8",
            None,
        ),
        (network(addresses=("mypc",), host="mypc"), None, "ok", "mypc is an address", None),
        (network(advertise=("1.2.3.4",)), None, "ok", "others are told 1.2.3.4", None),
        (network(host="127.0.0.1"), None, "warning", "only this PC itself", "--host 0.0.0.0"),
        (network(addresses=("127.0.0.1",)), None, "problem", "is it connected?", None),
        (network(), swarm(closed=CLOSED), "ok", "192.168.1.7", None),
        (
            network(),
            swarm(closed=((C, A),)),
            "problem",
            "attic can't reach 192.168.1.7 from another network: a router (NAT) is in between, and "
            "no member passes on what they say. Put both PCs into one VPN",
            "molink up --advertise ADDRESS",
        ),
        (
            network(),
            swarm(relayed=((C, A, B), (B, A, B), (A, C, B))),
            "warning",
            "attic reaches this PC by way of couch, couch reaches this PC over connections that "
            "this PC opens. That works, but a direct way may be shorter: a VPN",
            "molink up --advertise ADDRESS",
        ),
        (
            network(advertise=("1.2.3.4",), addresses=("127.0.0.1",)),
            swarm(closed=((C, A),)),
            "problem",
            "attic can't reach 1.2.3.4",
            "molink join --advertise ADDRESS",
        ),
        (
            network(),
            swarm(closed=((C, A),), peers=(PeerFact(A, "a"), PeerFact(C, "c", address="name"))),
            "ok",
            "192.168.1.7",
            None,
        ),
    ],
)
def test_nat(facts: Any, known: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_network(facts, known, 0), "nat"), level, text, command)


@pytest.mark.parametrize(
    ("facts", "level", "text", "command"),
    [
        (network(wsl="mirrored"), "ok", "shares the network of Windows", None),
        (network(wsl="nat"), "problem", "(nat), so no other PC can reach", MIRRORED),
        (network(wsl="nat", advertise=("1.2.3.4",)), "warning", "has to forward the ports", None),
    ],
)
def test_wsl(facts: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_network(facts, None, 0), "wsl"), level, text, command)


def test_outside_of_wsl_it_is_not_mentioned() -> None:
    assert "wsl" not in [one.check for one in check_network(network(), None, 0)]


@pytest.mark.parametrize(
    ("facts", "known", "level", "text", "command"),
    [
        (network(), None, "ok", "no swarm is announced on this network", None),
        (network(heard=("x",)), None, "ok", "1 swarm can be heard", None),
        (network(heard=("x", "y")), None, "ok", "2 swarms can be heard", None),
        (network(discovery=False), None, "ok", "switched off", None),
        (network(interfaces=()), None, "warning", "no network here on which", None),
        (network(deaf="no route"), None, "warning", "(mDNS): no route.", "sudo ufw allow"),
        (
            network(),
            swarm(porch=5479),
            "warning",
            "its announcement of the swarm isn't heard here: UDP port 5353 is closed",
            "5353/udp",
        ),
        (network(), swarm(porch=5479, leader=A), "warning", "this PC's own announcement", "5353"),
        (network(heard=("5" * 16,)), swarm(porch=5479), "ok", "1 swarm", None),
        (network(), swarm(porch=0), "ok", "no swarm is announced", None),
    ],
)
def test_discovery(facts: Any, known: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_network(facts, known, 0), "discovery"), level, text, command)


# --- folder, disk, sleep, clock, version ------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "facts", "known", "level", "text", "command"),
    [
        ("state", place(), None, "ok", "molink can be written", None),
        (
            "state",
            place(unwritable="Permission denied"),
            None,
            "problem",
            "can't be written: Permission denied",
            'sudo chown -R "me" "',
        ),
        (
            "state",
            place(unwritable="Access is denied", system="win32"),
            None,
            "problem",
            "Access is denied",
            '/grant "me:(OI)(CI)F"',
        ),
        (
            "state",
            place(damaged="options.json: bad"),
            None,
            "problem",
            "the options of the last start can't be read (options.json: bad)",
            "molink doctor --fix",
        ),
        ("state", place(open_to_others=True), None, "warning", "other users", "chmod 700"),
        ("disk", place(models=3 * 10**9), None, "ok", "models there take 3.0 GB", None),
        ("disk", place(free=2 * 10**9), None, "warning", "2.0 GB are free", None),
        ("disk", place(free=2 * 10**9, models=1), None, "warning", "few models", "molink rm NAME"),
        ("disk", place(free=1), None, "problem", "neither models nor", None),
        ("sleep", place(), None, "ok", "stays awake", None),
        ("sleep", place(on_battery=True), None, "warning", "Plug it in", None),
        ("sleep", place(keep_awake=False), None, "ok", "`keep_awake` is off", None),
        ("sleep", place(inhibitor=False), None, "warning", "no systemd-inhibit", "systemctl mask"),
        ("clock", place(), None, "ok", "no other PC's clock", None),
        ("clock", place(), swarm(clock=None), "ok", "no other PC's clock", None),
        ("clock", place(), swarm(), "ok", "as that of couch, within 0.2 s", None),
        ("clock", place(), swarm(leader=A, clock=9.0), "ok", "this PC leads", None),
        (
            "clock",
            place(),
            swarm(clock=-7.5),
            "warning",
            "7.5 s behind that of couch",
            "sudo timedatectl set-ntp true",
        ),
        ("clock", place(), swarm(clock=7.5, unsure=3.0), "ok", "within 7.5 s", None),
        (
            "clock",
            place(system="win32"),
            swarm(clock=4000.0),
            "problem",
            "4000.0 s ahead of that of couch: tokens seem expired",
            "w32tm /resync",
        ),
        ("clock", place(year=1970), None, "problem", "says it is 1970", "timedatectl"),
        ("version", place(), None, "ok", "molink 0.1.0", None),
        ("version", place(), swarm(), "ok", "as all 3 PCs of the swarm", None),
        (
            "version",
            place(version="0.2.0"),
            swarm(),
            "warning",
            "this is molink 0.2.0, but the daemon that runs here is still 0.1.0",
            "molink down",
        ),
        (
            "version",
            place(),
            swarm(peers=(PeerFact(A, "desk", "0.1.0"), PeerFact(B, "couch", "0.2.0"))),
            "warning",
            "this PC has molink 0.1.0, but couch has 0.2.0",
            "git pull && ./install.sh",
        ),
        (
            "version",
            place(system="win32"),
            swarm(peers=(PeerFact(A, "desk", "0.1.0"), PeerFact(B, "couch", "0.2.0"))),
            "warning",
            "couch has 0.2.0",
            "install.ps1",
        ),
    ],
)
def test_the_place(
    check: str, facts: Any, known: Any, level: str, text: str, command: str | None
) -> None:
    expect(of(check_host(facts, known), check), level, text, command)
