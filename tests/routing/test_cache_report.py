"""Cache reports and span digests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import WireError
from molink.facts.ring_times import RequestCosts
from molink.routing.cache_report import (
    MAX_DIGESTS,
    SPAN_TOKENS,
    CacheReport,
    pack_report,
    span_digests,
    unpack_report,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.serving import CacheUpdate, OutputToken, OutputTokens

digests = st.lists(st.integers(0, 2**64 - 1), max_size=20).map(tuple)


@given(digests, digests, st.booleans())
def test_reports_round_trip(added: tuple[int, ...], evicted: tuple[int, ...], whole: bool) -> None:
    report = CacheReport(7, whole, added, evicted, 4096, RequestCosts(1e-3, 1e-9, 1e-4))
    news, payload = pack_report(report)
    message = OutputTokens((OutputToken(1, "k", 3, 7),), news, Payload("u8", (len(payload),)))
    codec = data_codec()
    sent = [bytes(frame) for frame in codec.encode(message, payload)]
    decoded, there = codec.decode(sent)
    assert isinstance(decoded, OutputTokens)
    assert decoded.cache is not None
    assert there is not None
    assert unpack_report(decoded.cache, there) == report


@pytest.mark.parametrize(
    ("added", "size"), [(0, 7), (3, 16), (2**30, 8), (0, 8 * (MAX_DIGESTS + 1))]
)
def test_invalid_reports_are_rejected(added: int, size: int) -> None:
    with pytest.raises(WireError, match="not a report"):
        unpack_report(CacheUpdate(1, True, added), memoryview(bytes(size)))


tokens = st.lists(st.integers(0, 5), max_size=4 * SPAN_TOKENS)


@given(tokens, tokens)
def test_shared_prefixes_share_digests(one: list[int], other: list[int]) -> None:
    mine, theirs = span_digests(one), span_digests(other)
    assert len(mine) == len(one) // SPAN_TOKENS
    for index in range(min(len(mine), len(theirs))):
        end = (index + 1) * SPAN_TOKENS
        assert (mine[index] == theirs[index]) == (one[:end] == other[:end])


@given(tokens, st.integers(0, 4))
def test_digests_can_be_continued(prompt: list[int], spans: int) -> None:
    whole = span_digests(prompt)
    spans = min(spans, len(whole))
    after = whole[spans - 1].to_bytes(8, "little") if spans else bytes(8)
    assert span_digests(prompt[spans * SPAN_TOKENS :], after) == whole[spans:]


def test_digests_are_stable() -> None:
    assert span_digests(range(SPAN_TOKENS)) == (DIGEST,)


#: Digest of the tokens 0 to 63, the same on any PC and in any version.
DIGEST = 3678511507499414395
