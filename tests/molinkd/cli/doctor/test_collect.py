"""What ``molink doctor`` reads from other programs, the swarm and this PC."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.model_source import find_demo_model
from molinkd.cli.doctor import collect, collect_network, run_program
from molinkd.cli.doctor.collect import read_card, read_swarm
from molinkd.cli.doctor.facts import NvidiaCard
from molinkd.peer.agent.kernel_self_test import KernelResult, SelfTestResult
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings

LINUX = """\
Mon Nov 17 10:00:00 2025
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.14              Driver Version: 550.54.14    CUDA Version: 12.4     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
|=========================================+======================+======================|
|   0  NVIDIA GeForce RTX 3060        Off | 00000000:01:00.0  On |                  N/A |
|  0%   41C    P8              15W / 170W |    512MiB / 12288MiB |      2%      Default |
|   1  NVIDIA GeForce RTX 3090         On | 00000000:02:00.0 Off |                  N/A |
+-----------------------------------------+----------------------+----------------------+
"""
WINDOWS = """\
| NVIDIA-SMI 566.36                 Driver Version: 566.36         CUDA Version: 12.7     |
| GPU  Name                  Driver-Model | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|   0  NVIDIA GeForce RTX 4070      WDDM  |   00000000:01:00.0  On |                  N/A |
"""


def test_nvidia_smi_output() -> None:
    assert read_card(None) is None
    assert read_card((0, LINUX)) == NvidiaCard(
        ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 3090"), "550.54.14", "12.4"
    )
    assert read_card((0, WINDOWS)) == NvidiaCard(("NVIDIA GeForce RTX 4070",), "566.36", "12.7")
    assert read_card((0, "something else")) == NvidiaCard()
    assert read_card((9, "it couldn't\n communicate")) == NvidiaCard(
        error="it couldn't communicate"
    )
    assert read_card((9, "")) == NvidiaCard(error="nvidia-smi ended with 9")


def test_swarm_facts_from_status() -> None:
    peer = {"id": "a", "name": "desk", "version": "1", "address": "10.0.0.1", "state": "online"}
    status = {
        "swarm": "s",
        "leader": "b",
        "pairing_port": 5479,
        "trouble": None,
        "peers": [{**peer, "daemon_pid": 7}, {"id": "b", "state": "offline", "daemon_pid": 0}],
        "unreachable": [["b", "a"]],
        "relays": [
            {"from": "b", "to": "a", "through": "c"},
            {"from": "a", "to": "b", "through": "c", "punched": True},
        ],
        "router": {"kind": "cone", "forwards": "8.8.4.4", "protocol": "UPnP"},
        "time": 1000.0,
    }
    found = read_swarm(status, 7, 1009.0, 1011.0)
    assert (found.own_id, found.leader, found.pairing_port, found.unreachable) == (
        "a",
        "b",
        5479,
        (("b", "a"),),
    )
    assert (found.clock_offset_s, found.clock_error_s, found.relayed) == (
        10.0,
        1.0,
        (("b", "a", "c"),),
    )
    assert (found.punched, found.router) == ((("a", "b"),), "cone")
    assert (found.forwarded, found.forwarded_by) == ("8.8.4.4", "UPnP")
    assert [one.is_online for one in found.peers] == [True, False]
    # A status of an older version, or of a PC without a coordinator.
    bare = read_swarm({"swarm": "s", "peers": []}, 7, 0.0, 0.0)
    assert (bare.own_id, bare.clock_offset_s, bare.unreachable) == ("", None, ())


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found = collect_network._probe_port("control_port", "127.0.0.1", number)
        assert found.used_by
        assert not found.is_reserved
        if sys.platform == "linux":
            assert f"process {os.getpid()}" in found.used_by
    assert collect_network._probe_port("control_port", "127.0.0.1", number).used_by == ""


def test_this_pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def tested(device: str, threads: int, **more: Any) -> SelfTestResult:
        asked.append(device)
        assert more == {"model": None}
        return SelfTestResult(failure="not tried")

    monkeypatch.setattr(collect, "run_self_test", tested)
    monkeypatch.setattr(collect_network, "scan_network", lambda *_: [])
    monkeypatch.setenv("MOLINK_DEVICE", "cpu")
    said: list[str] = []
    facts = collect.collect_facts(Home(tmp_path / "new" / "home"), said.append)
    assert (asked, facts.daemon_pid, facts.swarm) == (["cpu"], 0, None)
    assert facts.host.write_error == ""
    assert facts.host.free_bytes > 0
    assert facts.network.addresses
    assert len(facts.network.ports) == 15
    assert not (tmp_path / "new").exists()
    assert len(said) == 1


def test_kernels_are_tested_with_the_served_models_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, asked = Home(tmp_path), list[Any]()
    home.kernel_checks.write_text("{}", encoding="utf-8")

    def tested(*_: Any, model: Path | None) -> SelfTestResult:
        asked.append(model)
        right = KernelResult(kernel="torch", dtype="f32", state="ok")
        return SelfTestResult(results=(right,))

    monkeypatch.setattr(collect, "run_self_test", tested)
    for name in ("molink-demo", "another"):
        collect._run_self_test(home, Settings(name="pc"), name)
    assert asked == [find_demo_model().path, None]
    # The stored result is deleted, so workers run the checks again.
    assert not home.kernel_checks.exists()


def test_a_missing_folder(tmp_path: Path) -> None:
    assert collect._write_error(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert collect._write_error(tmp_path / "nowhere") != ""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "part").write_bytes(b"1234")
    assert collect._folder_size(tmp_path / "models") == 4
    assert collect._folder_size(tmp_path / "nowhere") == 0


def test_corrupt_options_are_reported_and_ignored(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.options.write_text("{", encoding="utf-8")
    settings, damaged = collect._load_settings(home)
    assert str(home.options) in damaged
    assert settings.device == Settings(name="x").device


def test_programs_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_program.run_program("molink-has-no-such-program") is None
    code, text = run_program.run_program(sys.executable, "-c", "print('hello')") or (1, "")
    assert (code, text.strip()) == (0, "hello")
    monkeypatch.setattr(run_program, "_TIMEOUT_S", 0.0)
    code, text = run_program.run_program(sys.executable, "-c", "input()") or (1, "")
    assert code < 0
    assert "timed out" in text
