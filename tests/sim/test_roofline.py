"""Rooflines of a device and a model small enough to calculate by hand."""

from dataclasses import replace

import pytest

from molink.sim.profiles import DeviceProfile, ModelProfile
from molink.sim.roofline import HostShare, Roofline, StepRows

#: 1e9 bytes/s (half of the nominal rate) and 1e12 operations/s; 1 ms per forward pass.
DEVICE = DeviceProfile("d", "", 2, 1, 10, 0.5, 1.0, step_ms=1.0, tile=4)
#: A layer has 100 * 10 * (2 * 6 + 2 * 4) + 3 * 100 * 600 = 200,000 weights, the logits 5,000 * 100.
#: A token's KV takes 2 * 4 * 10 * 2 = 160 bytes per layer.
MODEL = ModelProfile("m", "", 8, 100, 600, 6, 4, 10, vocabulary=5000)


def roofline(*, is_last: bool = True) -> Roofline:
    return Roofline(DEVICE, MODEL, 5, is_last=is_last)


def test_weight_bytes() -> None:
    # 5 layers of 200,000 weights of 2 bytes, and 500,000 of the logits.
    assert roofline(is_last=False).weight_bytes == 2_000_000
    assert roofline().weight_bytes == 3_000_000


@pytest.mark.parametrize(
    ("rows", "milliseconds"),
    [
        # 1 ms for the pass, and 2 ms for reading 2 MB at 1 GB/s.
        (StepRows(decode=1), 3.0),
        (StepRows(decode=3, prefill=1), 3.0),
        # plus 1 MB of logits.
        (StepRows(decode=1, sampled=1), 4.0),
        # 800 bytes of KV for each of 1000 tokens: 0.8 MB.
        (StepRows(decode=1, decode_context=1000), 3.8),
        # 2 operations for each of 1e6 weights per row are 2 us: 998 rows are 1000 in tiles of 4.
        (StepRows(prefill=998), 1 + 2.0),
        (StepRows(prefill=1001), 1 + 2.008),
        (StepRows(prefill=4000), 1 + 8.0),
        # 4 operations * 5 layers * 6 heads * 10 are 1.2 ns per row and token before it.
        (StepRows(prefill=4000, prefill_context=1_000_000), 1 + 8.0 + 1.2),
        # 2 operations * 500,000 weights are 1 us per row: 2000 rows take longer than reading.
        (StepRows(decode=1, sampled=2000), 3.0 + 2.0),
    ],
)
def test_step_time(rows: StepRows, milliseconds: float) -> None:
    assert roofline().step_s(rows) == pytest.approx(milliseconds / 1000)


def test_a_mixture_reads_what_rows_choose() -> None:
    # Four experts of 100 * 3 * 300 weights, of which a row chooses one, beside 200,000 others.
    mixture = replace(
        MODEL,
        intermediate=900,  # the experts that a row chooses
        bytes_per_parameter=2 * 560_000 / 290_000,
        head_bytes=2.0,
        expert_share=360_000 / 560_000,
        chosen_share=0.25,
    )
    assert mixture.layer_parameters == 290_000
    stage = Roofline(DEVICE, mixture, 5, is_last=False)
    assert stage.weight_bytes == pytest.approx(5_600_000)
    assert Roofline(DEVICE, mixture, 5, is_last=True).weight_bytes == pytest.approx(6_600_000)
    # One row reads 290,000 weights per layer, two rows 200,000 and 7/16 of the experts, many rows
    # all.
    for rows, megabytes in ((1, 2.9), (2, 2.0 + 3.6 * 7 / 16), (200, 5.6)):
        assert stage.step_s(StepRows(decode=rows)) == pytest.approx((1 + megabytes) / 1000)


def test_experts_in_host_memory_take_the_time_of_the_cpu() -> None:
    mixture = replace(
        MODEL,
        intermediate=900,
        bytes_per_parameter=2 * 560_000 / 290_000,
        head_bytes=2.0,
        expert_share=360_000 / 560_000,
        chosen_share=0.25,
    )
    slower = replace(DEVICE, memory_gbs=DEVICE.memory_gbs / 4)
    stage = Roofline(DEVICE, mixture, 5, is_last=False, host=HostShare(0.5, slower))
    assert stage.host_bytes == pytest.approx(1_800_000)
    assert stage.weight_bytes == pytest.approx(3_800_000)
    # A row reads 900,000 bytes of experts, half of which take four times as long.
    assert stage.step_s(StepRows(decode=1)) == pytest.approx((1 + 2.45 + 4 * 0.45) / 1000)
    none = Roofline(DEVICE, mixture, 5, is_last=False, host=HostShare(0.0, slower))
    whole = Roofline(DEVICE, mixture, 5, is_last=False)
    assert none.make_profile() == whole.make_profile()


def test_kv_capacity() -> None:
    # 9 GB of 10 are used. 0.75 GB for activations and 0.003 GB of weights are subtracted; 800 bytes
    # hold a token.
    assert roofline().kv_tokens(DEVICE) == 10_308_750
    tiny = DeviceProfile("d", "", 2, 1, 0.8, 0.5, 1.0, step_ms=1.0)
    assert roofline().kv_tokens(tiny) == 0
