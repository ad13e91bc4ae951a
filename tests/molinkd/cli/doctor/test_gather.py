"""What ``molink doctor`` reads of other programs, of the swarm and of this PC."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.source import demo_model
from molinkd.cli.doctor import gather, gather_network
from molinkd.cli.doctor.facts import Card
from molinkd.cli.doctor.gather import read_card, read_swarm
from molinkd.peer.agent.self_test import KernelResult, SelfTest
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


def test_what_nvidia_smi_prints() -> None:
    assert read_card(None) is None
    assert read_card((0, LINUX)) == Card(
        ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 3090"), "550.54.14", "12.4"
    )
    assert read_card((0, WINDOWS)) == Card(("NVIDIA GeForce RTX 4070",), "566.36", "12.7")
    assert read_card((0, "something else")) == Card()
    assert read_card((9, "it couldn't\n communicate")) == Card(error="it couldn't communicate")
    assert read_card((9, "")) == Card(error="nvidia-smi ended with 9")


def test_the_swarm_by_its_status() -> None:
    peer = {"id": "a", "name": "desk", "version": "1", "address": "10.0.0.1", "state": "here"}
    status = {
        "swarm": "s",
        "leader": "b",
        "porch": 5479,
        "trouble": None,
        "peers": [{**peer, "daemon_pid": 7}, {"id": "b", "state": "away", "daemon_pid": 0}],
        "unreachable": [["b", "a"]],
        "relays": [{"from": "b", "to": "a", "through": "c"}],
        "time": 1000.0,
    }
    found = read_swarm(status, 7, 1009.0, 1011.0)
    assert (found.me, found.leader, found.porch, found.closed) == ("a", "b", 5479, (("b", "a"),))
    assert (found.clock, found.unsure, found.relayed) == (10.0, 1.0, (("b", "a", "c"),))
    assert [one.here for one in found.peers] == [True, False]
    # Of an older version, or by this PC alone.
    bare = read_swarm({"swarm": "s", "peers": []}, 7, 0.0, 0.0)
    assert (bare.me, bare.clock, bare.closed) == ("", None, ())


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found = gather_network._port("control_port", "127.0.0.1", number)
        assert found.taken
        assert not found.refused
        if sys.platform == "linux":
            assert f"process {os.getpid()}" in found.taken
    assert gather_network._port("control_port", "127.0.0.1", number).taken == ""


def test_this_pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def tested(device: str, threads: int, **more: Any) -> SelfTest:
        asked.append(device)
        assert more == {"model": None}
        return SelfTest(failure="not tried")

    monkeypatch.setattr(gather, "self_test", tested)
    monkeypatch.setattr(gather_network, "look_around", lambda *_: [])
    monkeypatch.setenv("MOLINK_DEVICE", "cpu")
    said: list[str] = []
    facts = gather.gather(Home(tmp_path / "new" / "home"), said.append)
    assert (asked, facts.daemon, facts.swarm) == (["cpu"], 0, None)
    assert facts.place.unwritable == ""
    assert facts.place.free > 0
    assert facts.network.addresses
    assert len(facts.network.ports) == 15
    assert not (tmp_path / "new").exists()
    assert len(said) == 2


def test_kernels_are_tried_with_the_shapes_of_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, asked = Home(tmp_path), list[Any]()
    home.proofs.write_text("{}", encoding="utf-8")

    def tested(*_: Any, model: Path | None) -> SelfTest:
        asked.append(model)
        right = KernelResult(kernel="torch", dtype="f32", state="ok")
        return SelfTest(results=(right,))

    monkeypatch.setattr(gather, "self_test", tested)
    for name in ("molink-demo", "another"):
        gather._tested(home, Settings(name="pc"), name)
    assert asked == [demo_model().path, None]
    assert not home.proofs.exists()  # workers are to try again


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert gather._unwritable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert gather._unwritable(tmp_path / "nowhere") != ""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "part").write_bytes(b"1234")
    assert gather._size(tmp_path / "models") == 4
    assert gather._size(tmp_path / "nowhere") == 0


def test_options_that_are_damaged_are_told_and_left_out(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.options.write_text("{", encoding="utf-8")
    settings, damaged = gather._settings(home)
    assert str(home.options) in damaged
    assert settings.device == Settings(name="x").device


def test_programs_that_are_not_there() -> None:
    assert gather._ask(["molink-has-no-such-program"]) is None
    assert gather_network._run("molink-has-no-such-program") == (None, "")
    code, text = gather._ask([sys.executable, "-c", "print('hello')"]) or (1, "")
    assert (code, text.strip()) == (0, "hello")
