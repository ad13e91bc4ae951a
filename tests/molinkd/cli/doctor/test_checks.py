"""Each finding of ``molink doctor``, and the facts that cause it."""

from typing import Any

import msgspec
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
    host,
    network,
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
        (device(), "ok", "torch 2.13.0+cpu (CPU build)", None),
        (device(WORKING), "ok", "torch 2.13.0+cu130 (for CUDA 13.0)", None),
        (
            device(card=CARD),
            "problem",
            "the GPU of this PC (NVIDIA GeForce RTX 3060) is not used",
            "molink setup --cuda",
        ),
        (
            device(is_plugged_in=True),
            "problem",
            "(an NVIDIA GPU) is not used",
            "molink setup --cuda",
        ),
        (
            device(card=CARD, system="win32"),
            "problem",
            "is not used",
            "molink setup --cuda",
        ),
        (device(card=CARD, configured_device="cpu"), "ok", "CPU build", None),
        (
            device(None, failure="ModuleNotFoundError: No module named 'torch'"),
            "problem",
            "this PC can't hold layers: ModuleNotFoundError",
            "molink setup",
        ),
        (
            device(None, failure="OSError: [WinError 126] c10.dll", system="win32"),
            "problem",
            "WinError 126",
            "winget install Microsoft.VCRedist.2015+.x64",
        ),
        (device(None), "problem", "unknown error", "molink setup"),
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
        (device(CUDA_BUILD), "ok", "no NVIDIA GPU found", None),
        (device(CUDA_BUILD, is_plugged_in=False), "ok", "no NVIDIA GPU found", None),
        (
            device(CUDA_BUILD, is_plugged_in=True),
            "problem",
            "its driver is not",
            "sudo ubuntu-drivers install && sudo reboot",
        ),
        (
            device(CUDA_BUILD, is_plugged_in=True, system="win32"),
            "problem",
            "its driver is not",
            "start https://www.nvidia.com/drivers",
        ),
        (
            device(CUDA_BUILD, card=CARD),
            "problem",
            "driver 550.54 supports CUDA up to 12.4",
            "sudo ubuntu-drivers install && sudo reboot  # not Ubuntu: https://www.nvidia.com/drivers"
            "\nmolink setup --cuda",
        ),
        (
            device(CUDA_BUILD, card=CARD, system="win32"),
            "problem",
            "the GPU can't be used",
            "molink setup --cuda",
        ),
        (
            device(
                CUDA_BUILD, card=NvidiaCard(error="couldn't communicate with the NVIDIA driver")
            ),
            "problem",
            "the GPU driver does not respond: couldn't communicate",
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
            "does not support GTX 1080 (compute capability 6.1; supported: sm_75, sm_86)",
            "molink up --device cpu",
        ),
        (device(gpu(gpus=(PASCAL,), kernels_for=())), "ok", "torch uses GTX 1080", None),
        (device(gpu(gpus=(PASCAL,), kernels_for=("sm_60",))), "ok", "torch uses GTX 1080", None),
        (
            device(gpu(gpus=(PASCAL,), kernels_for=("x", "sm_62"))),
            "problem",
            "does not support",
            "cpu",
        ),
        (device(gpu(gpus=(PASCAL,), kernels_for=("compute_50",))), "ok", "GTX 1080", None),
    ],
)
def test_the_gpu(facts: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_device(facts), "gpu"), level, text, command)


def test_the_gpu_is_not_checked_if_unwanted() -> None:
    for facts in (device(CPU_BUILD), device(WORKING, configured_device="cpu")):
        assert [one.check for one in check_device(facts)] == ["torch", "kernels"]


@pytest.mark.parametrize(
    ("problem", "system", "command"),
    [
        ("it is not installed", "linux", "molink setup --cuda"),
        ("it is not installed", "win32", "molink setup --cuda"),
        ("there is no C compiler", "linux", "sudo apt install gcc python3-dev"),
    ],
)
def test_a_gpu_without_triton_is_told_once(problem: str, system: str, command: str) -> None:
    about = msgspec.structs.replace(WORKING, triton_problem=problem)
    expect(of(check_device(device(about, system=system)), "triton"), "warning", problem, command)
    for fine in (
        device(WORKING),
        device(about, configured_device="cpu"),
        device(msgspec.structs.replace(CPU_BUILD, triton_problem=problem)),
    ):
        assert "triton" not in [one.check for one in check_device(fine)]


def failed(kernel: str, **changes: Any) -> KernelResult:
    given = {"dtype": "bf16", "error": 0.3, "tolerance": 0.03, **changes}
    return KernelResult(kernel=kernel, state="wrong", **given)


@pytest.mark.parametrize(
    ("facts", "level", "text", "command"),
    [
        (device(), "ok", "2 kernels of cpu (a CPU) match plain torch", None),
        (
            device(results=(failed("compiled-attention"), failed("compiled-attention"))),
            "warning",
            "compiled-attention (bf16) is off by 0.3 (tolerance 0.03)",
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
            "torch has no replacement: torch (bf16) is off by 0.3",
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
    expect(found, "problem", "plain-attention has no replacement", "--device cpu")


def test_unused_faulty_kernels_are_no_problem() -> None:
    right = [KernelResult(kernel=n, dtype="bf16", state="ok") for n in ("int8", "nf4")]
    right.append(KernelResult(kernel="gather-attention", dtype="bf16", state="ok"))
    results = (*right, failed("plain-attention"), failed("unpacked"))
    facts = device(WORKING, results=results, where="cuda:0")
    expect(of(check_device(facts), "kernels"), "ok", "match plain torch")


def test_a_faulty_replacement_of_absent_kernels_is_a_problem() -> None:
    absent = [KernelResult(kernel=n, dtype="f32", state="absent") for n in ("int8", "nf4")]
    right = [KernelResult(kernel=n, dtype="bf16", state="ok") for n in ("int8", "nf4")]
    facts = device(results=(*absent, *right, failed("unpacked", dtype="f32")))
    found = of(check_device(facts), "kernels")
    expect(found, "problem", "unpacked has no replacement: unpacked (f32)", "--stage none")


# --- the network ------------------------------------------------------------------------------


def port(number: int, setting: str = "control_port", **changes: Any) -> PortFact:
    return PortFact(setting, number, **changes)


@pytest.mark.parametrize(
    ("facts", "daemon", "level", "text", "command"),
    [
        (network(), 0, "ok", "molink's ports are free", None),
        (network(), 42, "ok", "molink runs here (process 42) and holds its ports", None),
        (
            network(ports=(port(5467, used_by="nc (process 9)"),)),
            0,
            "warning",
            "port 5467 (`control_port`) in use by nc (process 9): molink uses the next free",
            "molink up --control-port 5567",
        ),
        (
            network(ports=(port(5468, "worker_ports", used_by="nc"), port(5469, "worker_ports"))),
            0,
            "ok",
            "are free",
            None,
        ),
        (
            network(ports=(port(5468, "worker_ports", used_by="nc"),)),
            0,
            "problem",
            "all worker ports, 5468 to 5479, are in use; nc has one",
            "molink down",
        ),
        (
            network(ports=(port(80, used_by="Permission denied", is_reserved=True),)),
            0,
            "problem",
            "port 80 (`control_port`) can't be used: Permission denied",
            "molink up --control-port 0",
        ),
        (
            network(
                system="win32", ports=(port(5467, used_by="WinError 10013", is_reserved=True),)
            ),
            0,
            "problem",
            "Windows reserves port 5467 (`control_port`) (WinError 10013)",
            "netsh interface ipv4 show excludedportrange protocol=tcp",
        ),
    ],
)
def test_ports(facts: Any, daemon: int, level: str, text: str, command: str | None) -> None:
    expect(of(check_network(facts, None, daemon), "ports"), level, text, command)


UNREACHABLE = ((B, A),)


@pytest.mark.parametrize(
    ("facts", "known", "level", "text", "command"),
    [
        (network(), None, "ok", "no firewall found", None),
        (
            network(firewall="x", has_firewall_rule=True),
            None,
            "ok",
            "a rule for molink exists",
            None,
        ),
        (
            network(firewall="ufw"),
            None,
            "warning",
            "a firewall (ufw) is active",
            "sudo ufw allow 5466:5482/tcp && sudo ufw allow 5353/udp",
        ),
        (
            network(firewall="firewalld", discovery=False, worker_ports=(6000, 6001)),
            None,
            "warning",
            "a firewall (firewalld)",
            "sudo firewall-cmd --add-port=5466-5482/tcp --add-port=6000-6001/tcp",
        ),
        (network(firewall="ufw"), swarm(), "ok", "all other PCs of the swarm can connect", None),
        (
            network(firewall="ufw"),
            swarm(unreachable=UNREACHABLE),
            "problem",
            "couch can't connect to this PC on port 5467: its firewall (ufw) blocks the connection",
            "sudo ufw allow 5466:5482/tcp",
        ),
        (
            network(),
            swarm(unreachable=UNREACHABLE),
            "problem",
            "a firewall blocks the connection",
            "sudo ufw",
        ),
        (
            network(system="win32", firewall="Windows Defender Firewall", has_firewall_rule=False),
            swarm(unreachable=UNREACHABLE),
            "problem",
            "its firewall (Windows Defender Firewall)",
            "New-NetFirewallRule -DisplayName molink -Direction Inbound -Protocol TCP -LocalPort "
            "5466-5482 -Action Allow  # in PowerShell as administrator\n"
            "New-NetFirewallRule -DisplayName molink -Direction Inbound -Protocol UDP -LocalPort "
            "5353 -Action Allow",
        ),
        (
            network(),
            swarm(unreachable=((A, C),)),
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
        (network(), None, "ok", "192.168.1.7 is a local address", None),
        (
            network(addresses=("10.0.0.4", "8.8.8.8")),
            None,
            "ok",
            "this PC has a public address: 8.8.8.8",
            None,
        ),
        (network(addresses=("mypc",), host="mypc"), None, "ok", "mypc is a local address", None),
        (network(advertise=("1.2.3.4",)), None, "ok", "advertised addresses: 1.2.3.4", None),
        (network(host="127.0.0.1"), None, "warning", "only this PC can reach", "--host 0.0.0.0"),
        (network(addresses=("127.0.0.1",)), None, "problem", "is it connected?", None),
        (network(), swarm(unreachable=UNREACHABLE), "ok", "192.168.1.7", None),
        (
            network(),
            swarm(unreachable=((C, A),)),
            "problem",
            "attic can't reach 192.168.1.7 from another network: a router (NAT) is in between",
            "molink up --advertise ADDRESS",
        ),
        (
            network(),
            swarm(relayed=((C, A, B), (B, A, B), (A, C, B))),
            "warning",
            "attic reaches this PC through couch, couch reaches this PC over connections that "
            "this PC opens",
            "molink up --advertise ADDRESS",
        ),
        (
            network(),
            swarm(relayed=((C, A, B),), punched=((B, A),), router="symmetric"),
            "warning",
            "attic reaches this PC through couch: this PC's router takes another port for each "
            "connection (symmetric). Let it forward",
            "MOLINK_PORT_MAPPING=true molink up",
        ),
        (
            network(),
            swarm(punched=((A, C), (C, A)), router="cone"),
            "ok",
            "attic and this PC connect directly: its router keeps a connection's port (cone)",
            None,
        ),
        (
            network(),
            swarm(router="symmetric", forwarded="8.8.4.4", forwarded_by="UPnP"),
            "ok",
            "the router forwards molink's ports of 8.8.4.4 (UPnP)",
            None,
        ),
        (
            network(),
            swarm(not_forwarded="it answers neither PCP, NAT-PMP nor UPnP: enable one there"),
            "warning",
            "the router forwards no ports: it answers neither PCP, NAT-PMP nor UPnP",
            None,
        ),
        (
            network(advertise=("1.2.3.4",), addresses=("127.0.0.1",)),
            swarm(unreachable=((C, A),)),
            "problem",
            "attic can't reach 1.2.3.4",
            "molink join --advertise ADDRESS",
        ),
        (
            network(),
            swarm(
                unreachable=((C, A),), peers=(PeerFact(A, "a"), PeerFact(C, "c", address="name"))
            ),
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
        (network(wsl="mirrored"), "ok", "shares the network", None),
        (network(wsl="nat"), "problem", "(nat), so other PCs can't reach", MIRRORED),
        (network(wsl="nat", advertise=("1.2.3.4",)), "warning", "must forward the ports", None),
    ],
)
def test_wsl(facts: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_network(facts, None, 0), "wsl"), level, text, command)


def test_wsl_is_checked_only_inside_it() -> None:
    assert "wsl" not in [one.check for one in check_network(network(), None, 0)]


@pytest.mark.parametrize(
    ("facts", "known", "level", "text", "command"),
    [
        (network(), None, "ok", "no swarm found on this network", None),
        (network(announced_swarms=("x",)), None, "ok", "1 swarm found", None),
        (network(announced_swarms=("x", "y")), None, "ok", "2 swarms found", None),
        (network(discovery=False), None, "ok", "disabled", None),
        (network(interfaces=()), None, "warning", "no network for discovery", None),
        (
            network(multicast_error="no route"),
            None,
            "warning",
            "(mDNS): no route;",
            "sudo ufw allow",
        ),
        (
            network(),
            swarm(pairing_port=5479),
            "warning",
            "the swarm's announcement is not received here",
            "5353/udp",
        ),
        (
            network(),
            swarm(pairing_port=5479, leader=A),
            "warning",
            "this PC's own announcement",
            "5353",
        ),
        (network(announced_swarms=("5" * 16,)), swarm(pairing_port=5479), "ok", "1 swarm", None),
        (network(), swarm(pairing_port=0), "ok", "no swarm found", None),
    ],
)
def test_discovery(facts: Any, known: Any, level: str, text: str, command: str | None) -> None:
    expect(of(check_network(facts, known, 0), "discovery"), level, text, command)


# --- folder, disk, sleep, clock, version ------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "facts", "known", "level", "text", "command"),
    [
        ("state", host(), None, "ok", "molink is writable", None),
        (
            "state",
            host(write_error="Permission denied"),
            None,
            "problem",
            "is not writable: Permission denied",
            'sudo chown -R "me" "',
        ),
        (
            "state",
            host(write_error="Access is denied", system="win32"),
            None,
            "problem",
            "Access is denied",
            '/grant "me:(OI)(CI)F"',
        ),
        (
            "state",
            host(options_error="options.json: bad"),
            None,
            "problem",
            "the saved options can't be read (options.json: bad)",
            "molink doctor --fix",
        ),
        ("state", host(is_open_to_others=True), None, "warning", "other users", "chmod 700"),
        ("disk", host(model_bytes=3 * 10**9), None, "ok", "models use 3.0 GB", None),
        ("disk", host(free_bytes=2 * 10**9), None, "warning", "2.0 GB free", None),
        (
            "disk",
            host(free_bytes=2 * 10**9, model_bytes=1),
            None,
            "warning",
            "few models",
            "molink rm NAME",
        ),
        ("disk", host(free_bytes=1), None, "problem", "not enough for models", None),
        ("sleep", host(), None, "ok", "stays awake", None),
        ("sleep", host(on_battery=True), None, "warning", "Plug it in", None),
        ("sleep", host(keep_awake=False), None, "ok", "`keep_awake` is off", None),
        (
            "sleep",
            host(has_inhibitor=False),
            None,
            "warning",
            "no systemd-inhibit",
            "systemctl mask",
        ),
        ("clock", host(), None, "ok", "no other clock", None),
        ("clock", host(), swarm(clock_offset_s=None), "ok", "no other clock", None),
        ("clock", host(), swarm(), "ok", "within 0.2 s of couch", None),
        ("clock", host(), swarm(leader=A, clock_offset_s=9.0), "ok", "this PC leads", None),
        (
            "clock",
            host(),
            swarm(clock_offset_s=-7.5),
            "warning",
            "7.5 s behind that of couch",
            "sudo timedatectl set-ntp true",
        ),
        ("clock", host(), swarm(clock_offset_s=7.5, clock_error_s=3.0), "ok", "within 7.5 s", None),
        (
            "clock",
            host(system="win32"),
            swarm(clock_offset_s=4000.0),
            "problem",
            "4000.0 s ahead of that of couch: tokens may seem expired",
            "w32tm /resync",
        ),
        ("clock", host(year=1970), None, "problem", "shows the year 1970", "timedatectl"),
        ("version", host(), None, "ok", "molink 0.1.0", None),
        ("version", host(), swarm(), "ok", "like all 3 PCs of the swarm", None),
        (
            "version",
            host(version="0.2.0"),
            swarm(),
            "warning",
            "molink 0.2.0 is installed, but the running daemon is 0.1.0",
            "molink down",
        ),
        (
            "version",
            host(),
            swarm(peers=(PeerFact(A, "desk", "0.1.0"), PeerFact(B, "couch", "0.2.0"))),
            "warning",
            "this PC has molink 0.1.0, but couch has 0.2.0",
            "molink update",
        ),
    ],
)
def test_the_host(
    check: str, facts: Any, known: Any, level: str, text: str, command: str | None
) -> None:
    expect(of(check_host(facts, known), check), level, text, command)
