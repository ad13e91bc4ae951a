"""What the daemon is told of a device."""

import json

import pytest
import torch

from molink.stage import probe


def test_it_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        probe.main(["--device", "cpu", "--mbytes", "1", "--threads", "1"])
    finally:
        torch.set_num_threads(before)
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "cpu"
    assert found["read_rate"] > 0
    assert 0 < found["free"] <= found["total"]
    assert found["threads"] == 1
    assert found["name"]


def test_the_daemon_understands_it() -> None:
    import msgspec

    from molink.peer.device import Probe

    body = json.dumps(probe.probe("cpu", 1 << 20)).encode()
    assert msgspec.json.decode(body, type=Probe).kind == "cpu"
