"""Measured latencies, rates and losses between peers, for placement."""

from collections.abc import Sequence
from statistics import median

from molink.facts.ring_times import LinkFacts
from molink.util.change_detector import differs

#: Defaults for unmeasured links: a home network.
ASSUMED_LATENCY = 0.001
ASSUMED_RATE = 12.5e6
#: Defaults between two devices of one PC: its loopback.
LOCAL_LATENCY = 50e-6
LOCAL_RATE = 1e9
#: Maximum one-way latency within a local network, including Wi-Fi, in seconds. A nearby link is
#: equally fast in both directions; other links cross two internet connections, which seldom are.
MAX_NEARBY_LATENCY = 0.005
#: A measurement is significant if it differs from the last placement's value by this fraction, and
#: latencies also by this many seconds: measurements jitter.
_RELATIVE_CHANGE = 0.25
_LATENCY_CHANGE = 0.002
_LOSS_CHANGE = 0.002


class Links:
    """One-way latencies (seconds), rates (bytes/s) and shares of lost packets by direction.

    Reported values are trusted.
    """

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], LinkFacts] = {}
        #: Values at the last placement.
        self._at_placement: dict[tuple[str, str], LinkFacts] = {}
        #: The primary peer of each further device.
        self._primary_peers: dict[str, str] = {}
        #: Cached result of :meth:`_find_access_rates`.
        self._access_rates: tuple[dict[str, float], dict[str, float]] | None = None
        #: Whether a value has changed significantly since then.
        self.has_changed = False

    def copy(self) -> "Links":
        """Return a copy of the measurements, without a placement made from them."""
        found = Links()
        found._measured = dict(self._measured)
        found._primary_peers = dict(self._primary_peers)
        found.has_changed = bool(found._measured)
        return found

    def set_primary_peer(self, peer: str, pc: str) -> None:
        """Record that ``peer`` is a further device of the PC of ``pc``; empty: it is the primary
        peer.
        """
        if pc:
            self._primary_peers[peer] = pc
        else:
            self._primary_peers.pop(peer, None)

    def record_measurement(
        self,
        source: str,
        target: str,
        latency: float | None,
        rate: float | None,
        loss: float | None = None,
    ) -> None:
        """Record the measurements of ``source`` of the link to ``target``; ``None`` means not
        measured.
        """
        if latency is None and rate is None and loss is None:
            return
        old = self._measured.get((source, target), LinkFacts())
        new = self._measured[source, target] = LinkFacts(
            old.latency if latency is None else latency,
            old.rate if rate is None else rate,
            old.loss if loss is None else loss,
        )
        self._access_rates = None
        if _links_differ(new, self._at_placement.get((source, target), LinkFacts())):
            self.has_changed = True

    def drop_peer(self, peer: str) -> None:
        """Drop a peer that has left, since it may return at another place."""
        for known in (self._measured, self._at_placement):
            for pair in [pair for pair in known if peer in pair]:
                del known[pair]
        self._access_rates = None
        self._primary_peers.pop(peer, None)

    def latency_and_rate(self, source: str, target: str) -> tuple[float, float]:
        """Return latency and rate of one direction.

        A missing latency is replaced by the other direction's, and so is a missing rate of a nearby
        link. The rate of a distant link defaults to the minimum of the sender's uplink and the
        receiver's downlink.
        """
        latency, rate = self._latency(source, target), self._find_facts(source, target).rate
        if rate is None and latency > MAX_NEARBY_LATENCY:
            uplinks, downlinks = self._find_access_rates()
            rate = min(uplinks.get(source, ASSUMED_RATE), downlinks.get(target, ASSUMED_RATE))
        elif rate is None:
            rate = self._find_facts(target, source).rate
        assumed = LOCAL_RATE if self._are_co_located(source, target) else ASSUMED_RATE
        return latency, assumed if rate is None else rate

    def loss(self, source: str, target: str) -> float:
        """Return the share of packets lost in one direction; 0 if unknown."""
        loss = self._find_facts(source, target).loss
        return (self._find_facts(target, source).loss or 0.0) if loss is None else loss

    def _latency(self, source: str, target: str) -> float:
        latency = self._find_facts(source, target).latency
        if latency is None:
            latency = self._find_facts(target, source).latency
        if latency is None:
            return LOCAL_LATENCY if self._are_co_located(source, target) else ASSUMED_LATENCY
        return latency

    def _find_facts(self, source: str, target: str) -> LinkFacts:
        return self._measured.get((source, target), _UNKNOWN)

    def _are_co_located(self, one: str, other: str) -> bool:
        """Whether two peers are devices of one PC."""
        return self._primary_peers.get(one, one) == self._primary_peers.get(other, other)

    def _find_access_rates(self) -> tuple[dict[str, float], dict[str, float]]:
        """Find each peer's uplink and downlink rates: its fastest distant link per direction."""
        if self._access_rates is None:
            uplinks: dict[str, float] = {}
            downlinks: dict[str, float] = {}
            for (source, target), facts in self._measured.items():
                if facts.rate is not None and self._latency(source, target) > MAX_NEARBY_LATENCY:
                    uplinks[source] = max(facts.rate, uplinks.get(source, 0.0))
                    downlinks[target] = max(facts.rate, downlinks.get(target, 0.0))
            self._access_rates = uplinks, downlinks
        return self._access_rates

    def with_newcomer(self, peer: str, others: Sequence[str]) -> "Links":
        """Return a copy with one more peer, whose links are like the others' median."""
        known = [
            facts for pair, facts in self._measured.items() if all(each in others for each in pair)
        ]
        latencies = [facts.latency for facts in known if facts.latency is not None]
        rates = [facts.rate for facts in known if facts.rate is not None]
        usual = LinkFacts(
            median(latencies) if latencies else None, median(rates) if rates else None
        )
        found = Links()
        found._primary_peers = dict(self._primary_peers)
        found._measured = dict(self._measured)
        for other in others:
            found._measured[peer, other] = found._measured[other, peer] = usual
        return found

    def is_measured(self, source: str, target: str) -> bool:
        """Whether any measurement between two peers exists."""
        return (source, target) in self._measured or (target, source) in self._measured

    def mark_placed(self) -> None:
        """Record the current values as those of the last placement."""
        self._at_placement = dict(self._measured)
        self.has_changed = False


_UNKNOWN = LinkFacts()


def _links_differ(new: LinkFacts, old: LinkFacts) -> bool:
    one, other = (ASSUMED_LATENCY if v is None else v for v in (new.latency, old.latency))
    rate, old_rate = (ASSUMED_RATE if v is None else v for v in (new.rate, old.rate))
    return (
        differs(one, other, _RELATIVE_CHANGE, _LATENCY_CHANGE)
        or differs(rate, old_rate, _RELATIVE_CHANGE)
        or differs(new.loss or 0.0, old.loss or 0.0, _RELATIVE_CHANGE, _LOSS_CHANGE)
    )
