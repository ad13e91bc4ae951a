"""The packer of a link: what it measures and what it hands on."""

from itertools import count

import pytest

from molink.link.packing.compression import RowCodec
from molink.link.packing.compressor import Compressor, CompressorLimits
from molink.link.packing.packer import RowPacker
from molink.wire.messages.base import Coding, Payload

ROWS = bytes(range(64)) * 128
PLAIN = Payload("bf16", (16, 256))


def make(setting: str = "lossless", seq: float = 1e-6) -> tuple[RowPacker, Compressor]:
    """A packer whose clock goes on by ``seq`` seconds each time it is read."""
    compressor = Compressor(setting)
    seqs = count()
    return RowPacker(compressor, lambda: next(seqs) * seq), compressor


@pytest.mark.parametrize("bulk", [False, True])
def test_it_packs_and_measures(bulk: bool) -> None:
    packer, compressor = make()
    header, data = packer.pack_rows(bulk, PLAIN, memoryview(ROWS))
    assert header.coding is Coding.LOSSLESS
    assert header.coded == len(data) < len(ROWS)
    assert bytes(RowCodec().unpack_rows(header, data)[1]) == ROWS
    assert compressor.is_packing(bulk)
    assert compressor.estimate_gain(not bulk) is None
    worth = compressor.estimate_gain(bulk)
    assert worth is not None
    # A microsecond to pack and one to unpack.
    ratio = len(ROWS) / len(data)
    assert worth.core_share == pytest.approx(ratio * 12.5e6 * 2e-6 / len(ROWS))


def test_it_leaves_rows_alone_where_packing_is_too_slow() -> None:
    packer, compressor = make(seq=1.0)
    for _ in range(CompressorLimits().samples_in_row):
        header, _ = packer.pack_rows(True, PLAIN, memoryview(ROWS))
        assert header.coding is Coding.LOSSLESS
    for _ in range(CompressorLimits().samples_in_row):
        compressor.choose_coding(True, 1e9)
    rows = memoryview(ROWS)
    assert packer.pack_rows(True, PLAIN, rows) == (PLAIN, rows)


def test_it_decides_by_the_rate() -> None:
    packer, compressor = make(seq=1e-6)
    packer.pack_rows(True, PLAIN, memoryview(ROWS))
    assert compressor.is_packing(True)
    packer.set_rate(1e10)
    assert not compressor.is_packing(True)


def test_none_packs_nothing() -> None:
    packer, _ = make("none")
    rows = memoryview(ROWS)
    assert packer.pack_rows(True, PLAIN, rows) == (PLAIN, rows)
