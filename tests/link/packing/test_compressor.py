"""Packing is chosen by measurements alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.link.packing.compressor import (
    Compressor,
    CompressorLimits,
    PackDecision,
    PackedSample,
    PackingGain,
)
from molink.wire.messages.base import Coding

MBPS = 125_000.0
BULK, DECODE = True, False
SIZE = 196_608
PLAIN = PackDecision(Coding.PLAIN)
LOSSLESS = PackDecision(Coding.LOSSLESS)
SAMPLE = PackDecision(Coding.LOSSLESS, is_sample=True)


def message(
    pack: float = 1e9,
    unpack: float = 2e9,
    ratio: float = 1.5,
    size: int = SIZE,
    sample: bool = True,
) -> PackedSample:
    """A message packed and unpacked at these rates in bytes/s."""
    return PackedSample(size, round(size / ratio), size / pack, size / unpack if sample else None)


def compressor(
    rate: float | None = 100 * MBPS, setting: str = "lossless", **limits: float
) -> Compressor:
    made = Compressor(setting, CompressorLimits(**({"samples_in_row": 1} | limits)))
    made.set_rate(rate)
    return made


def test_nothing_is_packed_unless_requested() -> None:
    made = compressor(setting="none")
    assert made.choose_coding(BULK, 0.0) == made.choose_coding(DECODE, 0.0) == PLAIN


def test_the_first_message_of_a_kind_is_a_sample() -> None:
    made = compressor()
    assert made.choose_coding(BULK, 0.0) == SAMPLE
    assert made.choose_coding(BULK, 0.1) == PLAIN
    assert made.choose_coding(DECODE, 0.1) == SAMPLE
    assert made.estimate_gain(BULK) is None


def test_cold_first_sample_is_tolerated() -> None:
    made = compressor(samples_in_row=3)
    for pack in (1e7, 5e8, 1e9):
        assert made.choose_coding(BULK, 0.0) == SAMPLE
        made.on_packed(BULK, message(pack=pack))
    assert made.is_packing(BULK)
    assert made.choose_coding(BULK, 0.1) == LOSSLESS
    assert made.choose_coding(BULK, 1.0) == SAMPLE


def test_it_packs_on_a_slow_link() -> None:
    made = compressor()
    made.choose_coding(BULK, 0.0)
    made.on_packed(BULK, message())
    assert made.choose_coding(BULK, 0.1) == LOSSLESS
    # Packing takes 1.5 ns per byte and saves 26.7 of 80 ns.
    assert made.estimate_gain(BULK) == PackingGain(
        pytest.approx(80 / (1.5 + 80 / 1.5)), pytest.approx(0.028, 0.01)
    )


def test_it_sends_plain_on_a_fast_link() -> None:
    made = compressor(10_000 * MBPS)
    made.choose_coding(BULK, 0.0)
    made.on_packed(BULK, message())
    assert made.choose_coding(BULK, 0.1) == PLAIN


def test_int8_is_chosen_only_where_asked_for() -> None:
    made = compressor(setting="int8")
    assert made.choose_coding(BULK, 0.0) == PackDecision(Coding.INT8, is_sample=True)
    made.on_packed(BULK, message(ratio=2))
    assert made.choose_coding(BULK, 0.1) == PackDecision(Coding.INT8)


def test_it_decides_again_when_the_rate_changes() -> None:
    made = compressor()
    made.on_packed(BULK, message())
    rates = [100, 5000, 100, 20]
    decided = []
    for rate in rates:
        made.set_rate(rate * MBPS)
        decided.append(made.is_packing(BULK))
    assert decided == [True, False, True, True]


def test_a_link_that_was_not_measured_counts_as_100_mbps() -> None:
    made = compressor(None)
    made.on_packed(BULK, message())
    assert made.is_packing(BULK)
    made.set_rate(5000 * MBPS)
    assert not made.is_packing(BULK)
    made.set_rate(0.0)
    assert made.is_packing(BULK)


def test_hysteresis_keeps_the_decision() -> None:
    made = compressor(max_core_share=1.0)
    rate, size = 1000 * MBPS, 80_000
    # A factor of 1.06: of 8 ns per byte, 2.67 are saved and 2.21 are spent.
    middling = PackedSample(size, size * 2 // 3, size * 1.107e-9, size * 1.107e-9)
    made.set_rate(rate)
    made.on_packed(BULK, middling)
    worth = made.estimate_gain(BULK)
    assert worth is not None
    assert worth.gain == pytest.approx(1.06, 0.005)
    assert not made.is_packing(BULK)
    made.set_rate(rate / 2)
    assert made.is_packing(BULK)
    made.set_rate(rate)
    assert made.is_packing(BULK)
    made.set_rate(rate * 1.2)
    assert not made.is_packing(BULK)


def test_packing_is_bounded_by_core_share() -> None:
    # It would be faster, but would use a third of a core.
    made = compressor(1000 * MBPS)
    made.on_packed(BULK, message(pack=1e9, unpack=1.3e9))
    worth = made.estimate_gain(BULK)
    assert worth is not None
    assert worth.gain > 1.12
    assert worth.core_share == pytest.approx(0.33, 0.02)
    assert not made.is_packing(BULK)
    # Packing starts below three quarters of the bound, and continues up to the bound.
    made.set_rate(560 * MBPS)
    assert made.is_packing(BULK)
    made.set_rate(740 * MBPS)
    assert made.is_packing(BULK)
    made.set_rate(770 * MBPS)
    assert not made.is_packing(BULK)
    made.set_rate(740 * MBPS)
    assert not made.is_packing(BULK)


def test_decode_and_bulk_are_decided_separately() -> None:
    made = compressor(500 * MBPS)
    made.on_packed(BULK, message(pack=1.5e9))
    made.on_packed(DECODE, message(size=8192, pack=2e8, unpack=3e8))
    assert made.is_packing(BULK)
    assert not made.is_packing(DECODE)


def test_incompressible_rows_are_not_packed() -> None:
    made = compressor()
    made.on_packed(BULK, message(ratio=1.0))
    assert not made.is_packing(BULK)
    for _ in range(9):
        made.on_packed(BULK, message(ratio=1.5))
    assert made.is_packing(BULK)


def test_one_slow_message_changes_nothing() -> None:
    made = compressor()
    for _ in range(3):
        made.on_packed(BULK, message())
    made.on_packed(BULK, message(pack=1e6, unpack=1e6))
    assert made.is_packing(BULK)


def test_busy_machine_stops_packing() -> None:
    made = compressor()
    for _ in range(9):
        made.on_packed(BULK, message())
    assert made.is_packing(BULK)
    for _ in range(12):
        made.on_packed(BULK, message(pack=3e7, sample=False))
    assert not made.is_packing(BULK)


def test_samples_are_taken_while_packing_is_off() -> None:
    made = compressor(10_000 * MBPS)
    chosen = []
    for tenth in range(25):
        choice = made.choose_coding(BULK, tenth / 10)
        chosen.append(choice.coding is Coding.LOSSLESS)
        if chosen[-1]:
            made.on_packed(BULK, message())
    assert [n for n, packed in enumerate(chosen) if packed] == [0, 10, 20]


def test_unpacking_is_sampled_while_packing_is_on() -> None:
    made = compressor()
    made.on_packed(BULK, message())
    assert [made.choose_coding(BULK, now).is_sample for now in (0.0, 0.5, 1.0, 1.5)] == [
        True,
        False,
        True,
        False,
    ]


rates = st.floats(1e5, 1e10)


@given(
    rate=rates,
    messages=st.lists(
        st.tuples(rates, rates, st.floats(1.0, 4.0), st.integers(512, SIZE)), min_size=1
    ),
)
def test_packing_is_faster_and_within_its_core_share(
    rate: float, messages: list[tuple[float, float, float, int]]
) -> None:
    made = compressor(rate)
    limits = CompressorLimits()
    for pack, unpack, ratio, size in messages:
        made.on_packed(BULK, message(pack, unpack, ratio, size))
        worth = made.estimate_gain(BULK)
        assert worth is not None
        if made.is_packing(BULK):
            assert worth.gain >= limits.keep_gain
            assert worth.core_share <= limits.max_core_share
        else:
            assert worth.gain < limits.start_gain or worth.core_share > 0.75 * limits.max_core_share
