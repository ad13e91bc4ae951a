"""What a head tells of its prefix cache to those who route."""

import sys
from array import array
from dataclasses import dataclass

from molink.errors import WireError
from molink.facts.costs import Costs
from molink.routing.spans import DIGEST_BYTES
from molink.wire.messages.serving import CacheNews

#: Digests of a report: of 256 k tokens. It goes with the first token of an answer, 8 bytes each: at
#: 20 Mbps that token waits for 13 ms behind the longest one.
MAX_DIGESTS = 4096


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Spans that came into a cache and that left it since an earlier report.

    ``version`` is what the next report is to follow. If it is ``whole``, what is not in ``added``
    is not in the cache. Where there are more than :data:`MAX_DIGESTS`, it is not whole. The cache
    has room for ``room`` tokens (0: unknown).
    """

    version: int
    whole: bool
    added: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    room: int = 0
    costs: Costs | None = None


def pack_report(report: CacheReport) -> tuple[CacheNews, bytes]:
    """A report as a message's part and its payload."""
    news = CacheNews(report.version, report.whole, len(report.added), report.room, report.costs)
    return news, _swapped(array("Q", (*report.added, *report.evicted))).tobytes()


def unpack_report(news: CacheNews, payload: memoryview) -> CacheReport:
    """What :func:`pack_report` has packed.

    Raises:
        WireError: it says what can't be.
    """
    count, rest = divmod(payload.nbytes, DIGEST_BYTES)
    if rest or count > MAX_DIGESTS or news.added > count:
        raise WireError(f"{payload.nbytes} bytes are no report with {news.added} new digests")
    digests = array("Q")
    digests.frombytes(payload)
    spans = tuple(_swapped(digests))
    added, evicted = spans[: news.added], spans[news.added :]
    return CacheReport(news.version, news.whole, added, evicted, news.room, news.costs)


def _swapped(digests: "array[int]") -> "array[int]":
    """To or from little-endian."""
    if sys.byteorder == "big":
        digests.byteswap()
    return digests
