"""GGUF files are untrusted: any bytes are read completely or refused in one line."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molink.errors import BrokenModel, ModelError, UnsupportedModel
from molink.gguf.gguf_file import MAX_HEADER_BYTES, read_gguf

U32, STRING, LIST = 4, 8, 9
HUGE = 2**63


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def tensor(name: str, shape: tuple[int, ...] = (32, 2), kind: int = 8, offset: int = 0) -> bytes:
    """A tensor's entry; ``shape`` as the file has it, the row's length first."""
    extents = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + extents + struct.pack("<IQ", kind, offset)


def file(
    *entries: bytes,
    keys: tuple[bytes, ...] = (),
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 68,
) -> bytes:
    """A GGUF file with tensors and metadata, and ``data`` bytes of data."""
    tensors, metadata = counts or (len(entries), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, metadata) + b"".join((*keys, *entries))
    return head + bytes(-len(head) % 32) + bytes(data)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], Any]:
    def write_and_read(data: bytes) -> Any:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return read_gguf(path)

    return write_and_read


def test_metadata_and_tensors(read: Callable[[bytes], Any]) -> None:
    words = text("words") + struct.pack("<IIQ", LIST, STRING, 2) + text("a") + text("é")
    found = read(file(tensor("x"), keys=(number("n", 7), words)))
    assert found.metadata.get_integer("n") == 7
    assert found.metadata.get_strings("words") == ["a", "é"]
    one = found.tensors["x"]
    assert (one.shape, one.ggml_type.name, one.nbytes, one.offset % 32) == ((2, 32), "q8_0", 68, 0)


REFUSED: dict[str, tuple[bytes, type[ModelError], str]] = {
    "empty": (b"", BrokenModel, "truncated"),
    "no magic": (b"GGML" + bytes(40), BrokenModel, "doesn't begin with 'GGUF'"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1", BrokenModel, "git lfs pull"),
    "old": (file(version=1), UnsupportedModel, "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "big-endian"),
    "a name with a line's end": (file(tensor("x\ny")), BrokenModel, r"name 'x\\ny'"),
    "too many tensors": (file(counts=(HUGE, 0)), BrokenModel, f"{HUGE} tensors"),
    "too many keys": (file(counts=(0, HUGE)), BrokenModel, f"{HUGE} metadata keys"),
    "more tensors than there are": (file(counts=(1000, 0)), BrokenModel, "truncated|dimensions"),
    "long text": (file(keys=(struct.pack("<Q", HUGE),)), BrokenModel, f"text of {HUGE} bytes"),
    "text beyond the end": (
        file(keys=(text("k") + struct.pack("<IQ", STRING, 5000),)),
        BrokenModel,
        "truncated in metadata 'k'",
    ),
    "no UTF-8": (
        file(keys=(text("k") + struct.pack("<IQ", STRING, 2) + b"\xff\xfe",)),
        BrokenModel,
        "metadata 'k': a text is not UTF-8",
    ),
    "long list": (
        file(keys=(text("k") + struct.pack("<IIQ", LIST, U32, HUGE),)),
        BrokenModel,
        f"'k': a list of {HUGE} entries",
    ),
    "list beyond the end": (
        file(keys=(text("k") + struct.pack("<IIQ", LIST, STRING, 2**22),)),
        BrokenModel,
        "truncated in metadata 'k'",
    ),
    "list in a list": (
        file(keys=(text("k") + struct.pack("<IIQ", LIST, LIST, 1),)),
        BrokenModel,
        "'k': lists in lists",
    ),
    "unknown type": (file(keys=(text("k") + struct.pack("<I", 77),)), BrokenModel, "'k': type 77"),
    "key twice": (file(keys=(number("k", 1), number("k", 2))), BrokenModel, "'k' appears twice"),
    "alignment": (
        file(tensor("x"), keys=(number("general.alignment", 24),)),
        BrokenModel,
        "24 is not a power of two",
    ),
    "alignment of nothing": (
        file(tensor("x"), keys=(number("general.alignment", 0),)),
        BrokenModel,
        "general.alignment",
    ),
    "dimensions": (file(tensor("x", (1,) * 5)), BrokenModel, "x: 5 dimensions"),
    "no dimensions": (file(tensor("x", ())), BrokenModel, "x: 0 dimensions"),
    "an extent of nothing": (file(tensor("x", (32, 0))), BrokenModel, "x: shape"),
    "half a block": (file(tensor("x", (33, 2))), BrokenModel, "blocks of q8_0"),
    "unknown element type": (file(tensor("x", kind=999)), UnsupportedModel, "element type 999"),
    "known element type": (file(tensor("x", kind=16)), UnsupportedModel, "16 .IQ2_XXS."),
    "sizes that overflow": (file(tensor("x", (2**32, 2**32))), BrokenModel, "x: ends at byte"),
    "offset beyond the end": (file(tensor("x", offset=2**40)), BrokenModel, "x: ends at byte"),
    "offset between": (file(tensor("x", offset=7)), BrokenModel, "x: offset 7 is not a multiple"),
    "truncated": (file(tensor("x"), data=67), BrokenModel, "x: ends at byte"),
    "overlap": (
        file(tensor("x"), tensor("y", offset=32), data=128),
        BrokenModel,
        "tensors x and y overlap",
    ),
    "tensor twice": (
        file(tensor("x"), tensor("x", offset=96), data=196),
        BrokenModel,
        "x appears twice",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(read: Callable[[bytes], Any], name: str) -> None:
    data, kind, reason = REFUSED[name]
    with pytest.raises(kind, match=reason) as raised:
        read(data)
    assert "\n" not in str(raised.value)
    assert "model.gguf" in str(raised.value)


def test_a_header_without_end_is_not_read_to_it(
    read: Callable[[bytes], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_HEADER_BYTES < 2**30
    monkeypatch.setattr("molink.gguf.gguf_file.MAX_HEADER_BYTES", 1000)
    long = text("k") + struct.pack("<I", STRING) + text("y" * 2000)
    with pytest.raises(BrokenModel, match="over 1000 bytes"):
        read(file(keys=(long,)))


def test_folders_and_unknown_names(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(BrokenModel):
            read_gguf(path)
