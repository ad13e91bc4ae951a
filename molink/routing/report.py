"""What a head tells of its prefix cache to those who route."""

from dataclasses import dataclass

from molink.routing.costs import Costs

#: Digests of a report: of 256 k tokens. It goes with the first token of an answer, 8 bytes each: at
#: 20 Mbps that token waits for 13 ms behind the longest one.
MAX_DIGESTS = 4096


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Spans that came into a cache and that left it since an earlier report.

    ``version`` is what the next report is to follow. If it is ``whole``, what is not in ``added`` is
    not in the cache. Where there are more than :data:`MAX_DIGESTS`, it is not whole. The cache has room for ``room`` tokens (0: unknown).
    """

    version: int
    whole: bool
    added: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    room: int = 0
    costs: Costs | None = None
