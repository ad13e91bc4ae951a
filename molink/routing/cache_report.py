"""What a head tells of its prefix cache to those who route."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from molink.errors import WireError
from molink.facts.ring_times import RequestCosts
from molink.wire.messages.serving import CacheUpdate

#: Tokens of a span: prompts are compared by as many whole spans as they have. It is no multiple of
#: a pipeline's block size: these differ, and a prompt has to have the same digests everywhere.
SPAN_TOKENS = 64
#: Bytes of a digest, and what the first span of every prompt follows.
DIGEST_BYTES = 8
ROOT_DIGEST = bytes(DIGEST_BYTES)


def span_digests(tokens: Sequence[int], after: bytes = ROOT_DIGEST) -> tuple[int, ...]:
    """A digest for each whole span of ``tokens``: of that span and of all before it.

    ``after`` is the digest of what comes before ``tokens`` (little-endian).
    """
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    data, size = ids.tobytes(), SPAN_TOKENS * ids.itemsize
    found, digest = [], after
    for end in range(size, len(data) + 1, size):
        digest = blake2b(data[end - size : end], digest_size=DIGEST_BYTES, salt=digest).digest()
        found.append(int.from_bytes(digest, "little"))
    return tuple(found)


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
