"""Chooses the relay between two peers if one of them cannot connect to the other.

If the target can connect to the source, the source is its own relay: bytes travel over the
connection that the target has opened. Otherwise it is the member that both have reached with the
shortest path, and without one the rendezvous at which both are registered, until a member that has
not failed can relay. A much shorter path replaces it after a while. A relay that has failed for a
pair is not chosen again for a while, even if it was gone meanwhile: it may be hostile. All times in
seconds.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from molink.swarm.controller.events import ConnectionTriedEvent, SendMessageAction
from molink.wire.messages.relay import MAX_OF_PEER, CloseRelay, OpenRelay, RelayedRoute, RelayOpened

#: Maximum simultaneous relays in the swarm.
MAX_RELAYS = 64
#: Failed probes of a relay after which another one is chosen.
MAX_FAILURES = 2
#: Seconds that a relay may take to report that it has opened.
OPEN_TIMEOUT = 10.0
#: Seconds for which a failed relay is not chosen again for the same pair; doubles with each failure
#: up to the maximum. Its record is clean again when the maximum has passed after that.
FIRST_EXCLUSION, MAX_EXCLUSION = 30.0, 3600.0

#: Minimum seconds before a relay is replaced by one with a shorter path, and minimum gains: a share
#: of the path's latency, and seconds one way. A change interrupts streams until the ring has formed
#: again.
MIN_STAY, MIN_GAIN, MIN_GAIN_S = 300.0, 0.3, 0.01

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class RelayOfferedEvent:
    """A peer's report: its addresses, whether it can relay, and where it is registered."""

    peer: str
    addresses: tuple[str, ...]
    can_relay: bool
    #: ``host:port`` of its rendezvous.
    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class RelayOpenedEvent:
    """A peer has answered an :class:`OpenRelay`."""

    peer: str
    answer: RelayOpened


@dataclass(frozen=True, slots=True)
class RouteTriedEvent:
    """A peer has tried to connect to another, over its relayed route if ``is_relayed``.

    With ``is_punched``, its connections have moved from the relay to direct ones. ``failed_relay``
    is the id of a relay that forwarded probes but no data, or 0.
    """

    attempt: ConnectionTriedEvent
    is_relayed: bool = False
    is_punched: bool = False
    failed_relay: int = 0


@dataclass(frozen=True, slots=True)
class LivePeersChangedEvent:
    """The peers that are live now; all others have left. Sent several times a second."""

    peers: Collection[str]


RelayEvent = RelayOfferedEvent | RelayOpenedEvent | RouteTriedEvent | LivePeersChangedEvent
RelayAction = SendMessageAction | ConnectionTriedEvent


@dataclass(slots=True)
class _Relay:
    id: int
    relay_peer: str
    secret: bytes
    end_secret: bytes
    requested_at: float
    is_open: bool = False
    port: int = 0
    failures: int = 0
    is_punched: bool = False


@dataclass(slots=True)
class _Exclusion:
    """A relay's failures for a pair."""

    failures: int = 0
    until: float = 0.0
    is_over: bool = False


@dataclass(slots=True)
class _Peer:
    addresses: tuple[str, ...] = ()
    can_relay: bool = False
    rendezvous: str = ""
    #: One-way latency to each peer that it has connected to, and peers that it could not reach.
    latencies: dict[str, float] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)


class RelayPlanner:
    """Plans all relays of a swarm."""

    def __init__(self, make_secret: Callable[[], bytes]) -> None:
        """``make_secret()`` returns 70 random bytes."""
        self._make_secret = make_secret
        self._peers: dict[str, _Peer] = {}
        #: By source and target of the failed connection.
        self._relays: dict[Pair, _Relay] = {}
        #: Relays that have failed for a pair.
        self._exclusions: dict[tuple[Pair, str], _Exclusion] = {}
        #: The latest relays that ended while a peer was away, each with that peer.
        self._unclosed: deque[tuple[str, int]] = deque(maxlen=MAX_RELAYS)
        self._now = 0.0

    def handle(self, event: RelayEvent, now: float) -> list[RelayAction]:
        """Process an event. A :class:`ConnectionTriedEvent` in the result tells the reconciler that
        a relayed route has failed.
        """
        self._now = now
        out: list[RelayAction] = []
        match event:
            case RelayOfferedEvent(peer, addresses, relays, place):
                out += self._close_missed(peer)
                known = self._peers.setdefault(peer, _Peer())
                before = known.addresses, known.can_relay, known.rendezvous
                if before == (addresses, relays, place):
                    return out  # most reports change nothing
                known.addresses, known.can_relay, known.rendezvous = addresses, relays, place
            case LivePeersChangedEvent(peers):
                gone = self._peers.keys() - set(peers)
                silent = self._find_silent()
                if not (gone or silent or self._end_exclusions()):
                    return []
                for pair in silent:
                    out += self._give_up_relay(pair)
                for peer in gone:
                    self._drop_peer(peer)
            case RouteTriedEvent():
                out += self._on_route_tried(event)
            case RelayOpenedEvent():
                out += self._on_relay_opened(event)
        return [*out, *self._review_relays()]

    @property
    def relay_peers(self) -> dict[Pair, str]:
        """The relay of each connected pair, open or requested."""
        return {pair: relay.relay_peer for pair, relay in self._relays.items()}

    @property
    def punched_pairs(self) -> frozenset[Pair]:
        """Pairs whose connections have moved from their relay to direct ones."""
        return frozenset(pair for pair, relay in self._relays.items() if relay.is_punched)

    def validate(self) -> None:
        """Check the bounds; for tests."""
        assert len(self._relays) <= MAX_RELAYS
        for (by, to), relay in self._relays.items():
            assert {by, to} <= self._peers.keys()
            assert relay.relay_peer != to
            if relay.relay_peer not in self._peers:
                assert relay.relay_peer == self._peers[by].rendezvous == self._peers[to].rendezvous
                continue
            assert self._peers[relay.relay_peer].can_relay
            assert self._relay_count(relay.relay_peer) <= MAX_OF_PEER

    # --- events ------------------------------------------------------------------------------

    def _drop_peer(self, peer: str) -> None:
        del self._peers[peer]
        for other in self._peers.values():
            other.latencies.pop(peer, None)
            other.unreachable.discard(peer)

    def _find_silent(self) -> list[Pair]:
        """Return the pairs whose relay was requested too long ago."""
        latest = self._now - OPEN_TIMEOUT
        return [
            pair
            for pair, one in self._relays.items()
            if not one.is_open and one.requested_at < latest
        ]

    def _end_exclusions(self) -> bool:
        """End exclusions that are over, and drop old failures; return whether a relay may be chosen
        again.
        """
        ended = [key for key, one in self._exclusions.items() if one.until <= self._now]
        has_news = not all(self._exclusions[key].is_over for key in ended)
        for key in ended:
            self._exclusions[key].is_over = True
            if self._now >= self._exclusions[key].until + MAX_EXCLUSION:
                del self._exclusions[key]
        return has_news

    def _on_route_tried(self, event: RouteTriedEvent) -> list[RelayAction]:
        tried = event.attempt
        by, to = self._peers.get(tried.source), self._peers.get(tried.target)
        if by is None or to is None:
            return []
        pair = tried.source, tried.target
        if not event.is_relayed:
            if tried.succeeded:
                by.unreachable.discard(tried.target)
                by.latencies[tried.target] = tried.latency or by.latencies.get(tried.target, 0.0)
            else:
                by.latencies.pop(tried.target, None)
                by.unreachable.add(tried.target)
            return []
        relay = self._relays.get(pair)
        if relay is None:
            if not (
                tried.succeeded or event.failed_relay
            ):  # the relay of an earlier coordinator is gone
                by.unreachable.add(tried.target)
            return []
        if event.failed_relay:
            return self._on_data_lost(pair) if event.failed_relay == relay.id else []
        relay.is_punched = event.is_punched
        relay.failures = 0 if tried.succeeded else relay.failures + 1
        return self._give_up_relay(pair) if relay.failures >= MAX_FAILURES else []

    def _on_data_lost(self, pair: Pair) -> list[RelayAction]:
        """Give up a relay that passed no data, unless it is the only one."""
        others = [one for one in self._find_relays(pair) if one != self._relays[pair].relay_peer]
        return self._give_up_relay(pair) if others else []

    def _on_relay_opened(self, event: RelayOpenedEvent) -> list[RelayAction]:
        for pair, relay in self._relays.items():
            if relay.id == event.answer.id and relay.relay_peer == event.peer and not relay.is_open:
                if not event.answer.port:
                    return self._give_up_relay(pair)
                relay.port, relay.is_open = event.answer.port, True
                return self._announce_relay(pair, relay)
        return []

    # --- actions -----------------------------------------------------------------------------

    def _review_relays(self) -> list[RelayAction]:
        out: list[RelayAction] = []
        for pair in list(self._relays):
            used = self._relays[pair].relay_peer
            is_possible = self._is_needed(pair) and self._can_relay(pair, used)
            if not is_possible or self._has_better(pair):
                out += self._close_relay(pair)
        for by in sorted(self._peers):
            for to in sorted(self._peers[by].unreachable):
                if (by, to) not in self._relays and len(self._relays) < MAX_RELAYS:
                    out += self._open_relay((by, to))
        return out

    def _is_needed(self, pair: Pair) -> bool:
        by, to = pair
        return by in self._peers and to in self._peers and to in self._peers[by].unreachable

    def _has_better(self, pair: Pair) -> bool:
        """Whether a member without failures can replace the rendezvous or much shorten the path.

        Punched connections keep their relay: a change would break them.
        """
        relay = self._relays[pair]
        is_member = relay.relay_peer in self._peers
        has_stayed = relay.is_open and self._now >= relay.requested_at + MIN_STAY
        if relay.is_punched or (is_member and not has_stayed):
            return False
        others = [
            one
            for one in self._find_relays(pair)
            if one in self._peers and (pair, one) not in self._exclusions
        ]
        if not is_member:
            return bool(others)
        present = self._path_latency(pair, relay.relay_peer)
        gain = present - min((self._path_latency(pair, one) for one in others), default=present)
        return gain >= max(MIN_GAIN_S, MIN_GAIN * present)

    def _can_relay(self, pair: Pair, through: str) -> bool:
        if through and all(self._peers[end].rendezvous == through for end in pair):
            return True
        peer = self._peers.get(through)
        if peer is None or not peer.can_relay or through == pair[1]:
            return False
        return all(end == through or through in self._peers[end].latencies for end in pair)

    def _find_relays(self, pair: Pair) -> list[str]:
        """Return the peers that may relay for a pair now, and the rendezvous if both share it."""
        return [
            one
            for one in (*self._peers, self._peers[pair[0]].rendezvous)
            if self._can_relay(pair, one)
            and not self._is_excluded(pair, one)
            and (one not in self._peers or self._relay_count(one) < MAX_OF_PEER)
        ]

    def _is_excluded(self, pair: Pair, through: str) -> bool:
        found = self._exclusions.get((pair, through))
        return found is not None and self._now < found.until

    def _open_relay(self, pair: Pair) -> list[RelayAction]:
        fit = self._find_relays(pair)
        if not fit:
            return []
        through = min(fit, key=lambda one: self._rank_relay(pair, one))
        secret = self._make_secret()
        # The id is random, since relays that an earlier coordinator opened may still exist.
        id = int.from_bytes(secret[:6], "big")
        relay = self._relays[pair] = _Relay(id, through, secret[6:38], secret[38:], self._now)
        if through not in self._peers:  # a rendezvous needs no order
            relay.is_open = True
            return self._announce_relay(pair, relay)
        ends = tuple(dict.fromkeys(one for end in pair for one in self._peers[end].addresses))
        return [SendMessageAction(through, OpenRelay(id=relay.id, secret=relay.secret, ends=ends))]

    def _rank_relay(self, pair: Pair, through: str) -> tuple[bool, bool, float, str]:
        """Return a sort key of a relay for a pair; the best relay has the lowest key.

        Members come before the rendezvous, then the pair's dialing end, then lower latencies.
        """
        is_member = through in self._peers
        return not is_member, through != pair[0], self._path_latency(pair, through), through

    def _path_latency(self, pair: Pair, through: str) -> float:
        return sum(self._peers[end].latencies.get(through, 0.0) for end in pair)

    def _relay_count(self, peer: str) -> int:
        return sum(relay.relay_peer == peer for relay in self._relays.values())

    def _announce_relay(self, pair: Pair, relay: _Relay) -> list[RelayAction]:
        by, to = pair
        is_member = relay.relay_peer in self._peers
        addresses = self._peers[relay.relay_peer].addresses if is_member else ()

        def make_route(peer: str, dials: bool) -> RelayedRoute:
            return RelayedRoute(
                id=relay.id,
                secret=relay.secret,
                end_secret=relay.end_secret,
                peer=peer,
                role="dials" if dials else "waits",
                addresses=addresses,
                port=relay.port,
            )

        return [
            SendMessageAction(to, make_route(by, False)),
            SendMessageAction(by, make_route(to, True)),
        ]

    def _give_up_relay(self, pair: Pair) -> list[RelayAction]:
        found = self._exclusions.setdefault((pair, self._relays[pair].relay_peer), _Exclusion())
        seconds = min(FIRST_EXCLUSION * 2.0 ** min(found.failures, 16), MAX_EXCLUSION)
        found.failures, found.until, found.is_over = found.failures + 1, self._now + seconds, False
        return self._close_relay(pair)

    def _close_relay(self, pair: Pair) -> list[RelayAction]:
        relay = self._relays.pop(pair)
        out: list[RelayAction] = []
        for peer in dict.fromkeys((*pair, relay.relay_peer)):
            if peer in self._peers:
                out.append(SendMessageAction(peer, CloseRelay(id=relay.id)))
            else:
                self._unclosed.append((peer, relay.id))
        if self._is_needed(pair):
            out.append(ConnectionTriedEvent(*pair, succeeded=False))
        return out

    def _close_missed(self, peer: str) -> list[RelayAction]:
        """Tell a peer that has come back which of its relays have ended meanwhile."""
        missed = [one for one in self._unclosed if one[0] == peer]
        for one in missed:
            self._unclosed.remove(one)
        return [SendMessageAction(peer, CloseRelay(id=id)) for _, id in missed]
