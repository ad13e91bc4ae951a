"""The manifest of a sharded model: one root for the same content; hostile ones are refused."""

import hashlib
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.checkpoint.manifest import HashedEntry, Manifest, ShardEntry, manifest_root
from molink.checkpoint.safetensors_header import DTYPE_BYTES, TensorSpan
from molink.errors import BrokenModel, WireError

PLACE = f"owner/name@{'0' * 40}"
CONFIG = HashedEntry("config.json", 2, hashlib.sha256(b"{}").digest())
SHA = bytes(range(32))
ONE, TWO = (
    ShardEntry("model-1.safetensors", 100, SHA),
    ShardEntry("model-2.safetensors", 50, SHA[::-1]),
)


def span(shard: str, dtype: str = "F32", *shape: int) -> tuple[str, TensorSpan]:
    return shard, TensorSpan(shard, dtype, shape, 0, prod(shape) * DTYPE_BYTES[dtype], "t")


@st.composite
def models(draw: st.DrawFn) -> tuple[list[ShardEntry], dict[str, tuple[str, TensorSpan]]]:
    """Shards with tensors in them, in any order."""
    count = draw(st.integers(1, 5))
    names = [f"model-{number}.safetensors" for number in range(count)]
    kinds = st.tuples(
        st.sampled_from(names),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 4), max_size=3),
    )
    found = draw(st.dictionaries(st.text(min_size=1, max_size=8), kinds, max_size=8))
    tensors = {name: span(shard, dtype, *shape) for name, (shard, dtype, shape) in found.items()}
    sizes = {
        name: sum(s.nbytes for shard, s in tensors.values() if shard == name) for name in names
    }
    shards = [
        ShardEntry(
            name, sizes[name] + draw(st.integers(1, 100)), draw(st.binary(min_size=32, max_size=32))
        )
        for name in names
    ]
    return draw(st.permutations(shards)), tensors


@settings(max_examples=40, deadline=None)
@given(models())
def test_it_is_read_as_it_was_made(
    model: tuple[list[ShardEntry], dict[str, tuple[str, TensorSpan]]],
) -> None:
    shards, tensors = model
    if CONFIG.name in tensors or not {shard.name for shard in shards}.isdisjoint(tensors):
        return
    made = Manifest.build_sharded([CONFIG], PLACE, shards, tensors)
    assert (
        Manifest.build_sharded([CONFIG], PLACE, shards[::-1], dict(reversed(tensors.items())))
        == made
    )
    found = Manifest.open(made.raw, made.root)
    assert found == made
    assert found.hub == PLACE
    assert {*found.shards.values()} == {*shards}
    assert {name: (one.dtype, one.shape, one.nbytes) for name, one in found.placed.items()} == {
        name: (one.dtype, one.shape, one.nbytes) for name, (_, one) in tensors.items()
    }
    for name, (shard, _) in tensors.items():
        assert [one.name for one in found.find_shards([name])] == [shard]
    held = [shard.name for shard in shards[::2]]
    assert found.decode_bitfield(found.encode_bitfield(held)) == frozenset(held)


def content(**changed: Any) -> list[Any]:
    """The fields of a manifest, some of them changed."""
    fields = {
        "version": 2,
        "files": [CONFIG],
        "hub": PLACE,
        "shards": [ONE, TWO],
        "tensors": [["a", 0, "F32", [20]], ["b", 1, "F32", [10]]],
    }
    return [*{**fields, **changed}.values()]


def opened(made: object) -> Manifest:
    raw = msgspec.msgpack.encode(made)
    return Manifest.open(raw, manifest_root(raw))


@pytest.mark.parametrize(
    "name",
    [
        "../a",
        "a/b",
        "a\\b",
        "/etc/x",
        "C:x",
        "con",
        "NUL",
        "aux.x",
        ".hidden",
        "",
        "a" * 200,
        "ä",
        "x\0",
    ],
)
def test_a_shard_stays_in_its_folder(name: str) -> None:
    wrong = [f"{name}.safetensors", 100, SHA]
    with pytest.raises(BrokenModel, match=r"a shard with the name|can't be read"):
        opened(content(shards=[wrong, TWO]))


@pytest.mark.parametrize(
    "name", ["config.json", "manifest.molink", "tokenizer.json", "x.safetensors."]
)
def test_a_shard_takes_no_other_files_place(name: str) -> None:
    with pytest.raises(BrokenModel, match="a shard with the name"):
        opened(content(shards=[[name, 100, SHA], TWO]))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": 3}, "of version 3, and this molink knows 1 and 2: update molink"),
        ({"version": 0}, "can't be read"),
        ({"hub": ""}, "can't be read"),
        ({"hub": "owner/name"}, "can't be read"),
        ({"hub": f"{PLACE}\n"}, "can't be read"),
        ({"hub": f"owner/../name@{'0' * 40}"}, "can't be read"),
        ({"shards": []}, "can't be read"),
        ({"shards": [["m.safetensors", 100, SHA[1:]]]}, "can't be read"),
        ({"shards": [["m.safetensors", -1, SHA]]}, "can't be read"),
        ({"shards": [["m.safetensors", 2**60, SHA]]}, "can't be read"),
        ({"shards": [["m.safetensors", 100, SHA], ["M.safetensors", 100, SHA]]}, "only in case"),
        ({"tensors": [["a", 2, "F32", [1]]]}, "contradicts itself at a"),
        ({"tensors": [["a", -1, "F32", [1]]]}, "can't be read"),
        ({"tensors": [["a", 0, "X32", [1]]]}, "contradicts itself at a"),
        ({"tensors": [["a", 0, "F32", [26]]]}, r"take 104 bytes of 100"),
        ({"tensors": [["a", 0, "F32", [20]], ["b", 0, "F32", [6]]]}, "take 104 bytes of 100"),
        ({"tensors": [["a", 0, "F32", [2**53] * 8]]}, "take .* bytes of 100"),
        ({"tensors": [["a", 0, "F32", [1]], ["a", 0, "F32", [1]]]}, "tensors of the same name"),
        ({"tensors": [["config.json", 0, "F32", [1]]]}, "tensors of the same name"),
        ({"tensors": [[ONE.name, 0, "F32", [1]]]}, "tensors of the same name"),
        ({"files": [["config.json", 2, b""]]}, "contradicts itself at config.json"),
    ],
)
def test_inconsistent_input_is_refused(changed: dict[str, Any], why: str) -> None:
    assert opened(content()).placed["b"].nbytes == 40
    with pytest.raises(BrokenModel, match=why):
        opened(content(**changed))


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8) | st.binary(max_size=33),
        lambda inner: st.lists(inner, max_size=5),
        max_leaves=12,
    )
)
def test_nonsense_is_refused(made: object) -> None:
    with pytest.raises(BrokenModel):
        opened([2, made, PLACE, made, made])


def test_chunks_of_a_shard_are_checked_by_length_only() -> None:
    ONE.verify_chunk(0, bytes(100))
    with pytest.raises(WireError, match=r"chunk 1 of model-1\.safetensors came as 99 bytes"):
        ONE.verify_chunk(0, bytes(99))
