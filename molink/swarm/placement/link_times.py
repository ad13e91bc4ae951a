"""Computes how much each link, and each distance to requesting PCs, adds to the time per token."""

from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest

from molink.facts.ring_times import HANDLING_S, TOKEN_BYTES
from molink.facts.tcp_loss import expected_loss_s
from molink.swarm.placement.links import Links
from molink.swarm.placement.rings import LinkTimes, LinkTimeTable

#: Tokens of a typical prompt and answer. The prompt's rows pass every link once. The request and
#: the first token each travel once between the requesting PC and the first stage. Each further
#: token takes a round trip.
PROMPT_TOKENS, ANSWER_TOKENS = 512, 256
#: Maximum number of requesting PCs that are counted: those with the most requests.
_MAX_ASKERS = 32


class _LinkTimeRow(dict[int, LinkTimes | None]):
    """Links from one peer, estimated when needed, since a large swarm has a million pairs."""

    def __init__(self, estimate: Callable[[int], LinkTimes | None]) -> None:
        super().__init__()
        self._estimate = estimate

    def __missing__(self, target: int) -> LinkTimes | None:
        found = self[target] = self._estimate(target)
        return found


def estimate_link_times(
    peers: Sequence[str],
    unreachable: Sequence[frozenset[str]],
    links: Links,
    rows: int,
    row_bytes: int,
) -> LinkTimeTable:
    """Estimate the time of each link for a micro-batch of ``rows`` rows of ``row_bytes`` bytes.

    ``unreachable[i]`` are peers to which peer ``i`` cannot connect.
    """
    volume, tokens = rows * row_bytes, rows * TOKEN_BYTES

    def estimate(source: int, target: int) -> LinkTimes | None:
        if source == target or peers[target] in unreachable[source]:
            return None
        pair = peers[source], peers[target]
        latency, rate = links.latency_and_rate(*pair)
        loss = links.loss(*pair)
        row_s = latency + HANDLING_S + expected_loss_s(volume, 2 * latency, loss)
        token_s = latency + HANDLING_S + expected_loss_s(tokens, 2 * latency, loss)
        busy, tokens_busy = volume / rate, tokens / rate
        return LinkTimes(row_s + busy, busy, token_s + tokens_busy, tokens_busy)

    def make_row(source: int) -> _LinkTimeRow:
        return _LinkTimeRow(lambda target: estimate(source, target))

    return [make_row(source) for source in range(len(peers))]


def estimate_ask_times(
    peers: Sequence[str], askers: Mapping[str, float], links: Links
) -> Sequence[float]:
    """Estimate the seconds per token that requests add for each peer that may hold the first stage.

    ``askers`` are the PCs at which requests arrive, with the share or number of their requests.
    """
    most = nlargest(_MAX_ASKERS, askers, key=lambda peer: askers[peer])
    weight = sum(askers[asker] for asker in most)
    if not weight:
        return (0.0,) * len(peers)

    def round_trip_s(asker: str, peer: str) -> float:
        if asker == peer:
            return 0.0
        return links.latency_and_rate(asker, peer)[0] + links.latency_and_rate(peer, asker)[0]

    return [
        sum(askers[asker] * round_trip_s(asker, peer) for asker in most) / weight / ANSWER_TOKENS
        for peer in peers
    ]
