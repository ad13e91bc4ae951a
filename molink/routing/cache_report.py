"""Reports of prefix caches to routers, and the span digests that both compare."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from molink.errors import WireError
from molink.facts.ring_times import RequestCosts
from molink.wire.messages.serving import CacheUpdate

#: Tokens per span. The number is independent of the pipelines' block sizes, so that a prompt has
#: the same digests everywhere.
SPAN_TOKENS = 64
#: Bytes of a digest, and the parent of the first span.
DIGEST_BYTES = 8
ROOT_DIGEST = bytes(DIGEST_BYTES)


def span_digests(
    tokens: Sequence[int], after: bytes = ROOT_DIGEST, cache_scope: bytes = b""
) -> tuple[int, ...]:
    """Compute a digest for each complete span of ``tokens`` and everything before it.

    ``after`` is the digest (little-endian) of everything before ``tokens``. ``cache_scope`` keys
    every span's digest, not only the first: otherwise the digests in a report could be continued
    without the scope.
    """
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    data, size = ids.tobytes(), SPAN_TOKENS * ids.itemsize
    found, digest = [], after
    for end in range(size, len(data) + 1, size):
        digest = blake2b(
            data[end - size : end], digest_size=DIGEST_BYTES, key=cache_scope, salt=digest
        ).digest()
        found.append(int.from_bytes(digest, "little"))
    return tuple(found)


#: Maximum digests per report, for 256 k tokens. A report travels with an answer's first token: at
#: 20 Mbps the longest report delays it by 13 ms.
MAX_DIGESTS = 4096


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Spans that entered and left a cache since an earlier report.

    ``version`` identifies this report. If ``is_full``, the cache has only ``added_spans``. A cache
    with more than :data:`MAX_DIGESTS` spans never reports in full. ``capacity`` is the cache's room
    in tokens (0: unknown).
    """

    version: int
    is_full: bool
    added_spans: tuple[int, ...] = ()
    evicted_spans: tuple[int, ...] = ()
    capacity: int = 0
    costs: RequestCosts | None = None


def pack_report(report: CacheReport) -> tuple[CacheUpdate, bytes]:
    """Encode a report as a message field and a payload."""
    news = CacheUpdate(
        report.version, report.is_full, len(report.added_spans), report.capacity, report.costs
    )
    return news, _to_little_endian(
        array("Q", (*report.added_spans, *report.evicted_spans))
    ).tobytes()


def unpack_report(news: CacheUpdate, payload: memoryview) -> CacheReport:
    """Decode what :func:`pack_report` encoded.

    Raises:
        WireError: the report is invalid.
    """
    count, rest = divmod(payload.nbytes, DIGEST_BYTES)
    if rest or count > MAX_DIGESTS or news.num_added > count:
        raise WireError(f"{payload.nbytes} bytes are not a report of {news.num_added} new digests")
    digests = array("Q")
    digests.frombytes(payload)
    spans = tuple(_to_little_endian(digests))
    added, evicted = spans[: news.num_added], spans[news.num_added :]
    return CacheReport(news.version, news.is_full, added, evicted, news.capacity, news.costs)


def _to_little_endian(digests: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        digests.byteswap()
    return digests
