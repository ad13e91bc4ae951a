"""Measured latencies and rates between peers, for placement."""

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
#: A measurement is significant if it differs from the last placement's value by this fraction, and
#: latencies also by this many seconds: measurements jitter.
_RELATIVE_CHANGE = 0.25
_LATENCY_CHANGE = 0.002


class Links:
    """One-way latencies (seconds) and rates (bytes/s) by direction; reported values are trusted."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], LinkFacts] = {}
        #: Values at the last placement.
        self._at_placement: dict[tuple[str, str], LinkFacts] = {}
        #: The primary peer of each further device.
        self._primary_peers: dict[str, str] = {}
        #: Whether a value has changed significantly since then.
        self.has_changed = False

    def copy(self) -> "Links":
        """The same measurements, with no placement made from them."""
        found = Links()
        found._measured = dict(self._measured)
        found._primary_peers = dict(self._primary_peers)
        found.has_changed = bool(found._measured)
        return found

    def set_primary_peer(self, peer: str, pc: str) -> None:
        """``peer`` is a further device of the PC of ``pc``; empty: it is its PC's primary peer."""
        if pc:
            self._primary_peers[peer] = pc
        else:
            self._primary_peers.pop(peer, None)

    def record_measurement(
        self, source: str, target: str, latency: float | None, rate: float | None
    ) -> None:
        """Record that ``source`` has measured the link to ``target``; ``None``: not measured."""
        if latency is None and rate is None:
            return
        old = self._measured.get((source, target), LinkFacts())
        new = self._measured[source, target] = LinkFacts(
            old.latency if latency is None else latency, old.rate if rate is None else rate
        )
        if _links_differ(new, self._at_placement.get((source, target), LinkFacts())):
            self.has_changed = True

    def drop_peer(self, peer: str) -> None:
        """Drop a peer that is gone: it may return at another place."""
        for known in (self._measured, self._at_placement):
            for pair in [pair for pair in known if peer in pair]:
                del known[pair]
        self._primary_peers.pop(peer, None)

    def latency_and_rate(self, source: str, target: str) -> tuple[float, float]:
        """Latency and rate of that direction; the other direction fills in missing values."""
        there, back = (
            self._measured.get(pair, LinkFacts()) for pair in ((source, target), (target, source))
        )
        latency = back.latency if there.latency is None else there.latency
        rate = back.rate if there.rate is None else there.rate
        local = self._primary_peers.get(source, source) == self._primary_peers.get(target, target)
        return (
            (LOCAL_LATENCY if local else ASSUMED_LATENCY) if latency is None else latency,
            (LOCAL_RATE if local else ASSUMED_RATE) if rate is None else rate,
        )

    def with_newcomer(self, peer: str, others: Sequence[str]) -> "Links":
        """A copy with one more peer whose links are like the others' median."""
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
        found._measured = {**self._measured, **{(peer, other): usual for other in others}}
        return found

    def is_measured(self, source: str, target: str) -> bool:
        """Whether any measurement between them exists."""
        return (source, target) in self._measured or (target, source) in self._measured

    def mark_placed(self) -> None:
        """Mark the current values as those of the last placement."""
        self._at_placement = dict(self._measured)
        self.has_changed = False


def _links_differ(new: LinkFacts, old: LinkFacts) -> bool:
    one, other = (ASSUMED_LATENCY if v is None else v for v in (new.latency, old.latency))
    rate, old_rate = (ASSUMED_RATE if v is None else v for v in (new.rate, old.rate))
    return differs(one, other, _RELATIVE_CHANGE, _LATENCY_CHANGE) or differs(
        rate, old_rate, _RELATIVE_CHANGE
    )
