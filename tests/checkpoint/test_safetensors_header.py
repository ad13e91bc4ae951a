"""Headers of safetensors files: inconsistent ones are refused before any tensor is read."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.checkpoint import safetensors_header
from molink.checkpoint.safetensors_header import TensorSpan, encode_header, read_header
from molink.errors import BrokenModel


def entry(
    dtype: str = "F32", shape: tuple[int, ...] = (2, 2), offsets: tuple[int, int] = (0, 16)
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_file_of_safetensors_itself(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {"a": torch.ones(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    spans = read_header(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert {name: (s.dtype, s.shape, s.nbytes) for name, s in spans.items()} == {
        "a": ("F32", (3, 4), 48),
        "b": ("BF16", (5,), 10),
    }
    a = spans["a"]
    assert raw[a.offset : a.offset + a.nbytes] == struct.pack("<12f", *[1.0] * 12)


def test_a_written_header_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = {
        "a": TensorSpan("", "F32", (3, 4), 99, 48, "a"),
        "b": TensorSpan("", "U8", (), 0, 1, "b"),
    }
    header = encode_header(placed)
    assert len(header) % 8 == 0
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes(49))
    found = read_header(path)
    assert {name: (s.dtype, s.shape, s.offset - len(header)) for name, s in found.items()} == {
        "a": ("F32", (3, 4), 0),
        "b": ("U8", (), 48),
    }
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 100)
    with pytest.raises(BrokenModel, match="2 tensors are too many"):
        encode_header(placed)


def test_empty_tensors_and_scalars(tmp_path: Path, write_safetensors: Callable[..., Path]) -> None:
    header = {"none": entry(shape=(0, 4), offsets=(4, 4)), "one": entry(shape=(), offsets=(0, 4))}
    path = write_safetensors(tmp_path / "x.safetensors", header, 4)
    assert read_header(path)["one"].nbytes == 4


@pytest.mark.parametrize(
    ("header", "nbytes", "message"),
    [
        (b"{", 0, "not (a|valid) JSON"),
        (b"\xff\xfe", 0, "not (a|valid) JSON"),
        (b"[" * 200_000, 0, "not (a|valid) JSON"),
        ([1], 0, "not a JSON object"),
        ({"w": 3}, 0, "tensor w: its entry is not an object"),
        ({"w\n": 3}, 0, r"a tensor has the name 'w\\n'"),
        ({"w": entry(shape=(0,) * 999)}, 0, "tensor w: its entry has .* bytes"),
        ({"w": entry(dtype="F7")}, 16, "tensor w: unknown dtype 'F7'"),
        ({"w": entry(dtype=["F32"])}, 16, "tensor w: unknown dtype"),
        ({"w": entry(shape=(-1, 2))}, 16, "tensor w: shape"),
        ({"w": entry(shape=(True, 2))}, 16, "tensor w: shape"),
        ({"w": {"dtype": "F32", "data_offsets": [0, 4]}}, 16, "tensor w: shape None"),
        ({"w": entry(shape=(1,) * 9, offsets=(0, 4))}, 16, "tensor w: shape"),
        ({"w": entry(offsets=(0, 8, 16))}, 16, "tensor w: data_offsets"),
        ({"w": entry(offsets=(8, 0))}, 16, "tensor w: -8 bytes"),
        ({"w": entry(shape=(2**40, 2**40))}, 16, "tensor w: 16 bytes"),
        ({"w": entry()}, 15, "tensor w: ends at byte .* truncated"),
        ({"v": entry(), "w": entry(offsets=(8, 24))}, 24, "tensors v and w overlap"),
    ],
)
def test_contradictory_manifests_are_refused(
    tmp_path: Path,
    write_safetensors: Callable[..., Path],
    header: bytes | dict[str, Any] | list[int],
    nbytes: int,
    message: str,
) -> None:
    path = write_safetensors(tmp_path / "shard.safetensors", header, nbytes)
    with pytest.raises(BrokenModel, match=message) as caught:
        read_header(path)
    assert "shard.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "truncated"),
        (b"\x01\x02", "truncated"),
        (struct.pack("<Q", 50) + b"{}", "truncated within its header"),
        (struct.pack("<Q", 2**63), "not a safetensors file"),
    ],
)
def test_files_that_end_early(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(BrokenModel, match=message):
        read_header(tmp_path / "x.safetensors")


@given(raw=st.binary(max_size=300))
def test_any_bytes_give_spans_inside_the_file_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw) // 2) + raw)
    try:
        spans = read_header(path)
    except BrokenModel:
        return
    for span in spans.values():
        assert isinstance(span, TensorSpan)
        assert span.offset + span.nbytes <= len(raw) + 8


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(BrokenModel, match="is not a regular file"):
        read_header(tmp_path / "x.safetensors")
