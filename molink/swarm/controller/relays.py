"""Chooses the peer that relays between two peers of which one cannot connect to the other.

If the target can connect to the source, the source is its own relay: bytes travel over the
connection that the target has opened. Otherwise it is the member that both have reached with the
shortest path. All times in seconds.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from molink.swarm.controller.events import ConnectionTriedEvent, SendMessageAction
from molink.wire.messages.relay import CloseRelay, OpenRelay, RelayedRoute, RelayOpened

#: Relays at once, in the swarm and on one PC.
MAX_RELAYS, MAX_OF_PEER = 64, 16
#: Failures of a relay before another one is chosen.
MAX_FAILURES = 2

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class RelayOfferedEvent:
    """A peer's report: its addresses, and whether it can relay."""

    peer: str
    addresses: tuple[str, ...]
    can_relay: bool


@dataclass(frozen=True, slots=True)
class RelayOpenedEvent:
    """A peer has answered an :class:`OpenRelay`."""

    peer: str
    answer: RelayOpened


@dataclass(frozen=True, slots=True)
class RouteTriedEvent:
    """A peer has tried to connect to another; ``is_relayed``: over its relayed route."""

    attempt: ConnectionTriedEvent
    is_relayed: bool = False


@dataclass(frozen=True, slots=True)
class LivePeersChangedEvent:
    """The peers that are live now; all others are gone."""

    peers: Collection[str]


RelayEvent = RelayOfferedEvent | RelayOpenedEvent | RouteTriedEvent | LivePeersChangedEvent
RelayAction = SendMessageAction | ConnectionTriedEvent


@dataclass(slots=True)
class _Relay:
    id: int
    relay_peer: str
    secret: bytes
    port: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Peer:
    addresses: tuple[str, ...] = ()
    can_relay: bool = False
    #: One-way latency to each peer it has connected to; and peers it could not reach.
    latencies: dict[str, float] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)


class RelayPlanner:
    """All relays of a swarm."""

    def __init__(self, make_secret: Callable[[], bytes]) -> None:
        """``make_secret()`` returns 38 random bytes."""
        self._make_secret = make_secret
        self._peers: dict[str, _Peer] = {}
        #: By source and target of the failed connection.
        self._relays: dict[Pair, _Relay] = {}
        #: Relays that have failed for a pair.
        self._exhausted: set[tuple[Pair, str]] = set()

    def handle(self, event: RelayEvent) -> list[RelayAction]:
        """Process an event. A :class:`ConnectionTriedEvent` in the answer tells the reconciler that
        a relayed route has failed."""
        out: list[RelayAction] = []
        match event:
            case RelayOfferedEvent(peer, addresses, relays):
                known = self._peers.get(peer)
                if known is not None and (known.addresses, known.can_relay) == (addresses, relays):
                    return []  # as most reports
                known = self._peers.setdefault(peer, _Peer())
                known.addresses, known.can_relay = addresses, relays
            case LivePeersChangedEvent(peers):
                gone = self._peers.keys() - set(peers)
                if not gone:
                    return []
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

    def validate(self) -> None:
        """Check the bounds; for tests."""
        assert len(self._relays) <= MAX_RELAYS
        for (by, to), relay in self._relays.items():
            assert {by, to, relay.relay_peer} <= self._peers.keys()
            assert relay.relay_peer != to
            assert self._peers[relay.relay_peer].can_relay
            assert self._relay_count(relay.relay_peer) <= MAX_OF_PEER

    # --- events ------------------------------------------------------------------------------

    def _drop_peer(self, peer: str) -> None:
        del self._peers[peer]
        for other in self._peers.values():
            other.latencies.pop(peer, None)
            other.unreachable.discard(peer)
        self._exhausted = {
            (pair, through)
            for pair, through in self._exhausted
            if peer != through and peer not in pair
        }

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
        if relay is None or tried.succeeded:
            if relay is not None:
                relay.failures = 0
            return []
        relay.failures += 1
        return self._give_up_relay(pair) if relay.failures >= MAX_FAILURES else []

    def _on_relay_opened(self, event: RelayOpenedEvent) -> list[RelayAction]:
        for pair, relay in self._relays.items():
            if relay.id == event.answer.id and relay.relay_peer == event.peer and not relay.port:
                if not event.answer.port:
                    return self._give_up_relay(pair)
                relay.port = event.answer.port
                return self._announce_relay(pair, relay)
        return []

    # --- actions -----------------------------------------------------------------------------

    def _review_relays(self) -> list[RelayAction]:
        out: list[RelayAction] = []
        for pair in list(self._relays):
            if not self._is_needed(pair) or not self._can_relay(
                pair, self._relays[pair].relay_peer
            ):
                out += self._close_relay(pair)
        for by in sorted(self._peers):
            for to in sorted(self._peers[by].unreachable):
                if (by, to) not in self._relays and len(self._relays) < MAX_RELAYS:
                    out += self._open_relay((by, to))
        return out

    def _is_needed(self, pair: Pair) -> bool:
        by, to = pair
        return by in self._peers and to in self._peers and to in self._peers[by].unreachable

    def _can_relay(self, pair: Pair, through: str) -> bool:
        peer = self._peers.get(through)
        if peer is None or not peer.can_relay or through == pair[1]:
            return False
        return all(end == through or through in self._peers[end].latencies for end in pair)

    def _open_relay(self, pair: Pair) -> list[RelayAction]:
        fit = [
            one
            for one in self._peers
            if self._can_relay(pair, one)
            and (pair, one) not in self._exhausted
            and self._relay_count(one) < MAX_OF_PEER
        ]
        if not fit:
            return []
        through = min(fit, key=lambda one: (one != pair[0], self._path_latency(pair, one), one))
        secret = self._make_secret()
        # By chance, too: what an earlier coordinator has opened may still be there.
        relay = self._relays[pair] = _Relay(int.from_bytes(secret[:6], "big"), through, secret[6:])
        ends = tuple(dict.fromkeys(one for end in pair for one in self._peers[end].addresses))
        return [SendMessageAction(through, OpenRelay(id=relay.id, secret=relay.secret, ends=ends))]

    def _path_latency(self, pair: Pair, through: str) -> float:
        return sum(self._peers[end].latencies.get(through, 0.0) for end in pair)

    def _relay_count(self, peer: str) -> int:
        return sum(relay.relay_peer == peer for relay in self._relays.values())

    def _announce_relay(self, pair: Pair, relay: _Relay) -> list[RelayAction]:
        by, to = pair
        addresses = self._peers[relay.relay_peer].addresses

        def make_route(peer: str, dials: bool) -> RelayedRoute:
            return RelayedRoute(
                id=relay.id,
                secret=relay.secret,
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
        self._exhausted.add((pair, self._relays[pair].relay_peer))
        return self._close_relay(pair)

    def _close_relay(self, pair: Pair) -> list[RelayAction]:
        relay = self._relays.pop(pair)
        peers = [one for one in dict.fromkeys((*pair, relay.relay_peer)) if one in self._peers]
        out: list[RelayAction] = [SendMessageAction(one, CloseRelay(id=relay.id)) for one in peers]
        if self._is_needed(pair):
            out.append(ConnectionTriedEvent(*pair, succeeded=False))
        return out
