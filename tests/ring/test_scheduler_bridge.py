"""One report of a volume that is sampled in sub-chunks."""

import pytest

from molink.facts.drafts import MAX_DRAFTS
from molink.ring.scheduler_bridge import SampleCollector
from molink.ring.step import StepOutput
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import MAX_HEADER, data_codec
from molink.wire.messages.data_plane import (
    MAX_SLICES,
    Channel,
    ForcedTokens,
    Frame,
    MtpDrafts,
    RequestSlice,
    SampledId,
    SamplerOutput,
    TopLogprobs,
    Volume,
)

VOLUME = Volume(4, True, (RequestSlice(0, 0, 1, 1),), Payload("i32", (1,)))
ONE, TWO = SampledId(0, 5, 11), SampledId(2, 7, 12)
TOP = TopLogprobs(0, 5, (11,), (-0.5,))


def test_last_sub_chunk_reports_all_samples() -> None:
    collector = SampleCollector()
    first, last = SamplerOutput(4, (ONE,), (1,)), SamplerOutput(4, (TWO,), (1, 3))
    assert collector.add_output(first, StepOutput(VOLUME, None, first, (TOP,)), last=False) == [TOP]
    assert len(collector) == 1
    other = SamplerOutput(5, (ONE,))
    assert collector.add_output(other, StepOutput(VOLUME, None, other), last=True) == [other]
    assert collector.add_output(last, StepOutput(VOLUME, None, last), last=True) == [
        SamplerOutput(4, (ONE, TWO), (1, 3))
    ]
    assert not len(collector)


def test_last_sub_chunk_reports_all_forced_tokens() -> None:
    collector, forced = SampleCollector(), (ForcedTokens(0, (3, 4)), ForcedTokens(2, (5,)))
    for sub_chunk in forced:
        sampled = SamplerOutput(4, (), (), (sub_chunk,))
        sent = collector.add_output(
            sampled, StepOutput(VOLUME, None, sampled), last=sub_chunk is forced[1]
        )
    assert sent == [SamplerOutput(4, (), (), forced)]


@pytest.mark.parametrize("slices", [1, 20, 60, MAX_SLICES])
@pytest.mark.parametrize(("mtp_drafts", "nbytes"), [(False, 82), (True, 98)])
def test_drafts_fit_the_header_and_the_next_volume(
    slices: int, mtp_drafts: bool, nbytes: int
) -> None:
    large = 2**31 - 1
    choices = tuple(SampledId(large - index, large, large, -0.5) for index in range(slices))
    every = (large,) * MAX_DRAFTS
    forced = () if mtp_drafts else tuple(ForcedTokens(each.request, every) for each in choices)
    drafts = tuple(MtpDrafts(each.request, every, (100,) * MAX_DRAFTS) for each in choices)
    sampled = SamplerOutput(large, choices, (), forced, drafts if mtp_drafts else ())
    (found,) = SampleCollector().add_output(sampled, StepOutput(VOLUME, None, sampled), last=True)
    assert isinstance(found, SamplerOutput)
    assert found.sampled == choices
    kept = found.mtp_drafts if mtp_drafts else found.forced
    assert len(kept) == min(slices, 8, (4000 - 25 * slices) // nbytes)
    frame = Frame(large, Channel.DECODE, large, found)
    (header,) = data_codec().encode(frame)
    assert len(header) <= MAX_HEADER
    assert data_codec().decode([header]) == (frame, None)
