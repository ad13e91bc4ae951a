"""Which PC passes bytes on between two of which one can't connect to the other.

That one may be able to be dialled by the other: then it is its own relay, and the bytes travel
over a connection that the other has opened. Else it is a member that both have reached, the one
over which their way is shortest. All times are in seconds.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from molink.swarm.controller.events import SendMessage, Tried
from molink.wire.messages.relaying import CloseRelay, Detour, OpenRelay, RelayOpen

#: Relays at once, in the swarm and on one PC.
MAX_RELAYS, MAX_OF_PEER = 64, 16
#: Failures to get through after which another PC is asked.
TRIES = 2

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Offered:
    """A peer's report: where it is, and whether it passes on what others say."""

    peer: str
    addresses: tuple[str, ...]
    relays: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """A peer has answered an :class:`OpenRelay`."""

    peer: str
    answer: RelayOpen


@dataclass(frozen=True, slots=True)
class Attempted:
    """A peer has tried to connect to another; ``relayed``: by way of its detour."""

    tried: Tried
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Live:
    """Those that are there now; all others are gone."""

    peers: Collection[str]


Event = Offered | Opened | Attempted | Live
Decision = SendMessage | Tried


@dataclass(slots=True)
class _Relay:
    id: int
    through: str
    secret: bytes
    port: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Peer:
    addresses: tuple[str, ...] = ()
    relays: bool = False
    #: Those that it has connected to, and how far away they are; and those that it could not reach.
    reached: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


class Relays:
    """All relays of a swarm."""

    def __init__(self, make_secret: Callable[[], bytes]) -> None:
        """``make_secret()`` gives 38 random bytes."""
        self._make_secret = make_secret
        self._peers: dict[str, _Peer] = {}
        #: By who can't connect to whom.
        self._relays: dict[Pair, _Relay] = {}
        #: Through whom a pair could not get.
        self._spent: set[tuple[Pair, str]] = set()

    def handle(self, event: Event) -> list[Decision]:
        """What follows; a :class:`Tried` is for the reconciler: that way is closed again."""
        out: list[Decision] = []
        match event:
            case Offered(peer, addresses, relays):
                known = self._peers.get(peer)
                if known is not None and (known.addresses, known.relays) == (addresses, relays):
                    return []  # as most reports
                known = self._peers.setdefault(peer, _Peer())
                known.addresses, known.relays = addresses, relays
            case Live(peers):
                gone = self._peers.keys() - set(peers)
                if not gone:
                    return []
                for peer in gone:
                    self._forget(peer)
            case Attempted():
                out += self._found(event)
            case Opened():
                out += self._opened(event)
        return [*out, *self._review()]

    @property
    def ways(self) -> dict[Pair, str]:
        """Through whom each pair is connected, or is to be."""
        return {pair: relay.through for pair, relay in self._relays.items()}

    def validate(self) -> None:
        """Check the bounds; for tests."""
        assert len(self._relays) <= MAX_RELAYS
        for (by, to), relay in self._relays.items():
            assert {by, to, relay.through} <= self._peers.keys()
            assert relay.through != to
            assert self._peers[relay.through].relays
            assert self._of(relay.through) <= MAX_OF_PEER

    # --- events ------------------------------------------------------------------------------

    def _forget(self, peer: str) -> None:
        del self._peers[peer]
        for other in self._peers.values():
            other.reached.pop(peer, None)
            other.failed.discard(peer)
        self._spent = {
            (pair, through) for pair, through in self._spent if peer != through and peer not in pair
        }

    def _found(self, event: Attempted) -> list[Decision]:
        tried = event.tried
        by, to = self._peers.get(tried.by), self._peers.get(tried.to)
        if by is None or to is None:
            return []
        pair = tried.by, tried.to
        if not event.relayed:
            if tried.ok:
                by.failed.discard(tried.to)
                by.reached[tried.to] = tried.latency or by.reached.get(tried.to, 0.0)
            else:
                by.reached.pop(tried.to, None)
                by.failed.add(tried.to)
            return []
        relay = self._relays.get(pair)
        if relay is None or tried.ok:
            if relay is not None:
                relay.failures = 0
            return []
        relay.failures += 1
        return self._give_up(pair) if relay.failures >= TRIES else []

    def _opened(self, event: Opened) -> list[Decision]:
        for pair, relay in self._relays.items():
            if relay.id == event.answer.id and relay.through == event.peer and not relay.port:
                if not event.answer.port:
                    return self._give_up(pair)
                relay.port = event.answer.port
                return self._tell(pair, relay)
        return []

    # --- decisions ---------------------------------------------------------------------------

    def _review(self) -> list[Decision]:
        out: list[Decision] = []
        for pair in list(self._relays):
            if not self._wanted(pair) or not self._can(pair, self._relays[pair].through):
                out += self._close(pair)
        for by in sorted(self._peers):
            for to in sorted(self._peers[by].failed):
                if (by, to) not in self._relays and len(self._relays) < MAX_RELAYS:
                    out += self._open((by, to))
        return out

    def _wanted(self, pair: Pair) -> bool:
        by, to = pair
        return by in self._peers and to in self._peers and to in self._peers[by].failed

    def _can(self, pair: Pair, through: str) -> bool:
        peer = self._peers.get(through)
        if peer is None or not peer.relays or through == pair[1]:
            return False
        return all(end == through or through in self._peers[end].reached for end in pair)

    def _open(self, pair: Pair) -> list[Decision]:
        fit = [
            one
            for one in self._peers
            if self._can(pair, one)
            and (pair, one) not in self._spent
            and self._of(one) < MAX_OF_PEER
        ]
        if not fit:
            return []
        through = min(fit, key=lambda one: (one != pair[0], self._length(pair, one), one))
        secret = self._make_secret()
        # By chance, too: what an earlier coordinator has opened may still be there.
        relay = self._relays[pair] = _Relay(int.from_bytes(secret[:6], "big"), through, secret[6:])
        return [SendMessage(through, OpenRelay(id=relay.id, secret=relay.secret))]

    def _length(self, pair: Pair, through: str) -> float:
        return sum(self._peers[end].reached.get(through, 0.0) for end in pair)

    def _of(self, peer: str) -> int:
        return sum(relay.through == peer for relay in self._relays.values())

    def _tell(self, pair: Pair, relay: _Relay) -> list[Decision]:
        by, to = pair
        addresses = self._peers[relay.through].addresses

        def detour(peer: str, dials: bool) -> Detour:
            return Detour(
                id=relay.id,
                secret=relay.secret,
                peer=peer,
                role="dials" if dials else "waits",
                addresses=addresses,
                port=relay.port,
            )

        return [SendMessage(to, detour(by, False)), SendMessage(by, detour(to, True))]

    def _give_up(self, pair: Pair) -> list[Decision]:
        self._spent.add((pair, self._relays[pair].through))
        return self._close(pair)

    def _close(self, pair: Pair) -> list[Decision]:
        relay = self._relays.pop(pair)
        told = [one for one in dict.fromkeys((*pair, relay.through)) if one in self._peers]
        out: list[Decision] = [SendMessage(one, CloseRelay(id=relay.id)) for one in told]
        if self._wanted(pair):
            out.append(Tried(*pair, ok=False))
        return out
