"""What a head tells of its prefix cache to those who route."""

import sys
from array import array
from dataclasses import dataclass

from molink.errors import WireError
from molink.facts.request_costs import RequestCosts
from molink.routing.spans import DIGEST_BYTES
from molink.wire.messages.serving import CacheUpdate

#: Digests of a report: of 256 k tokens. It goes with the first token of an answer, 8 bytes each: at
#: 20 Mbps that token waits for 13 ms behind the longest one.
MAX_DIGESTS = 4096


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Spans that came into a cache and that left it since an earlier report.

    ``version`` is what the next report is to follow. If it is ``is_full``, what is not in
    ``added_spans`` is not in the cache. Where there are more than :data:`MAX_DIGESTS`, it is not
    whole. The cache has room for ``capacity`` tokens (0: unknown).
    """

    version: int
    is_full: bool
    added_spans: tuple[int, ...] = ()
    evicted_spans: tuple[int, ...] = ()
    capacity: int = 0
    costs: RequestCosts | None = None


def pack_report(report: CacheReport) -> tuple[CacheUpdate, bytes]:
    """A report as a message's part and its payload."""
    news = CacheUpdate(
        report.version, report.is_full, len(report.added_spans), report.capacity, report.costs
    )
    return news, _to_little_endian(
        array("Q", (*report.added_spans, *report.evicted_spans))
    ).tobytes()


def unpack_report(news: CacheUpdate, payload: memoryview) -> CacheReport:
    """What :func:`pack_report` has packed.

    Raises:
        WireError: it says what can't be.
    """
    count, rest = divmod(payload.nbytes, DIGEST_BYTES)
    if rest or count > MAX_DIGESTS or news.num_added > count:
        raise WireError(f"{payload.nbytes} bytes are no report with {news.num_added} new digests")
    digests = array("Q")
    digests.frombytes(payload)
    spans = tuple(_to_little_endian(digests))
    added, evicted = spans[: news.num_added], spans[news.num_added :]
    return CacheReport(news.version, news.is_full, added, evicted, news.capacity, news.costs)


def _to_little_endian(digests: "array[int]") -> "array[int]":
    """To or from little-endian."""
    if sys.byteorder == "big":
        digests.byteswap()
    return digests
