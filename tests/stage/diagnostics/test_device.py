"""What the daemon learns about a device."""

import json
from pathlib import Path

import pytest
import torch

from molink.stage import torch_dtypes as dtypes
from molink.stage.diagnostics import device as probe


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
    assert found["block_size"] == 1


def test_the_daemon_parses_the_probe() -> None:
    import msgspec

    from molinkd.peer.agent.device_probe import DeviceProbe

    body = json.dumps(probe.probe_device("cpu", 1 << 20)).encode()
    assert msgspec.json.decode(body, type=DeviceProbe).kind == "cpu"


@pytest.mark.parametrize("native", [True, False])
def test_bf16_support_is_reported(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(dtypes, "cpu_supports_bf16", lambda: native)
    found = probe.probe_device("cpu", 1 << 20)
    computed = dtypes.choose_dtype("auto", "bf16", torch.device("cpu"))
    assert found["bf16"] is native
    assert (computed == "bf16") is native


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three fake GPUs, whose kernels are not checked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index % 2 * 5 + 2, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(probe, "measure_read_rate", lambda device, nbytes: 1e9)


@pytest.mark.usefixtures("cards")
def test_the_memory_of_a_gpu() -> None:
    found = probe.probe_device("auto", 1 << 20)
    assert (found["kind"], found["index"], found["name"]) == ("cuda", 1, "card 1")
    assert (found["free"], found["total"]) == (7, 9)
    assert found["bf16"] is True


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("proven", "expected"),
    [
        ((), (False, False, 1)),
        (("gguf-blocks",), (True, False, 1)),
        (("triton-attention",), (False, True, 1)),
        (("flash-attention", "triton-attention"), (False, True, 256)),
    ],
)
def test_what_a_gpu_has_proven_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    proven: tuple[str, ...],
    expected: tuple[bool, bool, int],
) -> None:
    monkeypatch.setattr(probe, "find_proven_kernels", lambda path, device: proven)
    found = probe.probe_device("cuda:0", 1 << 20, tmp_path / "checks.json")
    assert (found["blocks"], found["reads_pages"], found["block_size"]) == expected
    unknown = probe.probe_device("cuda:0", 1 << 20)
    assert (unknown["blocks"], unknown["reads_pages"], unknown["block_size"]) == (False, False, 1)
