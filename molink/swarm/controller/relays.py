"""Chooses the relay between two peers if one of them cannot connect to the other.

If the target can connect to the source, the source is its own relay: bytes travel over the
connection that the target has opened. Otherwise it is the member that both have reached with the
shortest path, and without one the rendezvous at which both are registered. A relay that has failed
for a pair is not chosen again for a while, even if it was gone meanwhile: it may be hostile.

A better way is tried beside the used one, and replaces it without breaking a connection once the
ends have measured that it is better: a much shorter path, a member instead of the rendezvous, or
the target's own port, once the source can dial it. What a relay says about itself counts for
nothing. All times in seconds.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from molink.swarm.controller.events import ConnectionTriedEvent, SendMessageAction
from molink.swarm.controller.relay_exclusions import Pair, RelayExclusions
from molink.wire.messages.relay import MAX_OF_PEER, CloseRelay, OpenRelay, RelayedRoute, RelayOpened

#: Maximum simultaneous relays in the swarm.
MAX_RELAYS = 64
#: Failed probes of a relay after which another one is chosen.
MAX_FAILURES = 2
#: Seconds that a relay may take to report that it has opened.
OPEN_TIMEOUT = 10.0
#: Seconds between two searches for a shorter path, and the minimum gains of one: a share of the
#: latency, and seconds one way.
CHECK_INTERVAL, MIN_GAIN, MIN_GAIN_S = 30.0, 0.3, 0.01
#: Seconds that the ends may take to measure a relay, and to move connections to it.
TRIAL_TIMEOUT, MOVE_TIMEOUT = 40.0, 15.0


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
    is the id of a relay that forwarded probes but no data, or 0; ``tried_relay`` that of one that
    was tried beside the used one.
    """

    attempt: ConnectionTriedEvent
    is_relayed: bool = False
    is_punched: bool = False
    failed_relay: int = 0
    tried_relay: int = 0


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
    #: One way, as the ends have measured it; ``None`` if unknown.
    latency: float | None = None
    #: The same when it was chosen.
    promised: float | None = None
    #: Connections move to this relay until then.
    settles_at: float = 0.0
    #: When a shorter path was last looked for.
    checked_at: float = 0.0


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
        #: Relays that are tried beside the used ones.
        self._trials: dict[Pair, _Relay] = {}
        #: Relays that connections leave, and when they are closed.
        self._replaced: list[tuple[float, _Relay]] = []
        #: Relays that have failed for a pair, and those that were no better than another one.
        self._exclusions, self._pauses = RelayExclusions(), RelayExclusions()
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
                overdue = self._end_overdue()
                may_use = self._exclusions.drop_ended(now)
                may_try = self._pauses.drop_ended(now)
                is_due = any(self._is_due(pair) for pair in self._relays)
                if not (gone or overdue or may_use or may_try or is_due or self._has_settled()):
                    return self._close_replaced()
                out += overdue + self._close_replaced()
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
        assert len(self._relays) + len(self._trials) <= MAX_RELAYS
        assert self._trials.keys() <= self._relays.keys()
        for (by, to), relay in (*self._relays.items(), *self._trials.items()):
            assert {by, to} <= self._peers.keys()
            if relay.relay_peer not in self._peers:
                assert relay.relay_peer == self._peers[by].rendezvous == self._peers[to].rendezvous
                continue
            is_left = relay is self._relays[by, to] and (by, to) in self._trials
            assert is_left or relay.relay_peer == to or self._peers[relay.relay_peer].can_relay
            assert self._relay_count(relay.relay_peer) <= MAX_OF_PEER

    # --- events ------------------------------------------------------------------------------

    def _drop_peer(self, peer: str) -> None:
        del self._peers[peer]
        for other in self._peers.values():
            other.latencies.pop(peer, None)
            other.unreachable.discard(peer)

    def _end_overdue(self) -> list[RelayAction]:
        """Give up relays that did not open in time, and those that the ends did not measure."""
        out: list[RelayAction] = []
        for pair in [pair for pair, one in self._relays.items() if self._is_overdue(one)]:
            out += self._give_up_relay(pair)
        for pair, one in list(self._trials.items()):
            if self._is_overdue(one) or self._now > one.requested_at + TRIAL_TIMEOUT:
                out += self._end_trial(pair)
        return out

    def _is_overdue(self, relay: _Relay) -> bool:
        return not relay.is_open and self._now > relay.requested_at + OPEN_TIMEOUT

    def _has_settled(self) -> bool:
        """Whether connections have moved to a relay meanwhile."""
        settled = [one for one in self._relays.values() if 0 < one.settles_at <= self._now]
        for one in settled:
            one.settles_at = 0.0
        return bool(settled)

    def _close_replaced(self) -> list[RelayAction]:
        """Close relays that all connections have left."""
        due = [relay for at, relay in self._replaced if at <= self._now]
        self._replaced = [one for one in self._replaced if one[0] > self._now]
        return [action for one in due for action in self._order_close(one, one.relay_peer)]

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
        if event.tried_relay:
            return self._on_trial_measured(pair, event)
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
        relay.latency = relay.latency if tried.latency is None else tried.latency
        relay.failures = 0 if tried.succeeded else relay.failures + 1
        return self._give_up_relay(pair) if relay.failures >= MAX_FAILURES else []

    def _on_data_lost(self, pair: Pair) -> list[RelayAction]:
        """Give up a relay that passed no data, unless it is the only one."""
        others = [one for one in self._find_relays(pair) if one != self._relays[pair].relay_peer]
        return self._give_up_relay(pair) if others else []

    def _on_relay_opened(self, event: RelayOpenedEvent) -> list[RelayAction]:
        for pair, relay in (*self._relays.items(), *self._trials.items()):
            if relay.id == event.answer.id and relay.relay_peer == event.peer and not relay.is_open:
                if not event.answer.port:
                    is_trial = relay is self._trials.get(pair)
                    return self._end_trial(pair) if is_trial else self._give_up_relay(pair)
                relay.port, relay.is_open = event.answer.port, True
                return self._announce_relay(pair, relay)
        return []

    def _on_trial_measured(self, pair: Pair, event: RouteTriedEvent) -> list[RelayAction]:
        """Use a relay if it is better than the used one; give it up otherwise."""
        trial, latency = self._trials.get(pair), event.attempt.latency
        if trial is None or trial.id != event.tried_relay:
            return []
        is_working = event.attempt.succeeded and latency is not None
        if not is_working or not self._is_better(pair, trial.relay_peer, latency or 0.0):
            return self._end_trial(pair)
        former, self._relays[pair] = self._relays[pair], self._trials.pop(pair)
        trial.latency = trial.promised = latency
        trial.settles_at, trial.checked_at = self._now + MOVE_TIMEOUT, self._now
        if _is_gain(self._used_latency(pair, former), self._promised_latency(pair, former)):
            self._pauses.add_failure(pair, former.relay_peer, self._now)
        self._replaced.append((trial.settles_at, former))
        return self._order_close(former, *pair)

    # --- actions -----------------------------------------------------------------------------

    def _review_relays(self) -> list[RelayAction]:
        out: list[RelayAction] = []
        for pair in list(self._relays):
            if not self._is_possible(pair):
                out += self._close_relay(pair)
                continue
            trial = self._trials.get(pair)
            if trial is not None and not self._can_relay(pair, trial.relay_peer):
                out += self._end_trial(pair)
            if better := self._find_better(pair):
                out += self._try_relay(pair, better)
            elif pair not in self._trials and not self._is_wanted(pair):
                out += self._close_relay(pair)
        for by in sorted(self._peers):
            for to in sorted(self._peers[by].unreachable):
                if (by, to) not in self._relays and self._has_room():
                    out += self._open_relay((by, to))
        return out

    def _has_room(self) -> bool:
        return len(self._relays) + len(self._trials) < MAX_RELAYS

    def _is_needed(self, pair: Pair) -> bool:
        by, to = pair
        return by in self._peers and to in self._peers and to in self._peers[by].unreachable

    def _is_possible(self, pair: Pair) -> bool:
        """Whether the relay may still work."""
        used = self._relays[pair].relay_peer
        return self._peers.keys() >= set(pair) and self._is_between(pair, used)

    def _is_wanted(self, pair: Pair) -> bool:
        """Whether connections may stay with the relay."""
        relay = self._relays[pair]
        if self._now < relay.settles_at:
            return True
        return self._is_needed(pair) and self._can_relay(pair, relay.relay_peer)

    def _find_better(self, pair: Pair) -> str:
        """Return a relay that is worth a trial beside the used one; empty without one.

        Punched connections keep their relay, unless the target can be dialled.
        """
        relay = self._relays[pair]
        used = relay.relay_peer
        if pair in self._trials or not relay.is_open or self._now < relay.settles_at:
            return ""
        if not self._is_needed(pair):
            others = [pair[1]] if used not in pair else []
        elif relay.is_punched and self._is_wanted(pair):
            return ""
        elif self._is_due(pair) or used not in self._peers or not self._is_wanted(pair):
            relay.checked_at = self._now
            others = [one for one in self._find_relays(pair) if one in self._peers]
        else:
            others = [pair[0]] if self._can_relay(pair, pair[0]) else []
        others = [
            one
            for one in others
            if one != used
            and self._has_room()
            and not self._pauses.is_excluded(pair, one, self._now)
            and not self._exclusions.has_failed(pair, one)
            and self._relay_count(one) < MAX_OF_PEER
        ]
        best = min(others, key=lambda one: self._rank_better(pair, one), default="")
        if not best or not self._is_better(pair, best, self._path_latency(pair, best)):
            return ""
        return best

    def _is_better(self, pair: Pair, through: str, latency: float) -> bool:
        """Whether a way through a peer with that one-way latency is better than the used one."""
        relay = self._relays[pair]
        used = relay.relay_peer
        if not self._is_wanted(pair) or used not in self._peers:
            return True
        if through in pair and used not in pair:
            return True  # no third PC is needed
        return _is_gain(self._used_latency(pair, relay), latency)

    def _is_due(self, pair: Pair) -> bool:
        """Whether to look for a shorter path."""
        relay = self._relays[pair]
        is_used = relay.is_open and not relay.is_punched and pair not in self._trials
        return is_used and self._now >= relay.checked_at + CHECK_INTERVAL

    def _used_latency(self, pair: Pair, relay: _Relay) -> float:
        """One-way latency as measured, or the sum of the paths to the relay."""
        found = relay.latency
        return self._path_latency(pair, relay.relay_peer) if found is None else found

    def _promised_latency(self, pair: Pair, relay: _Relay) -> float:
        found = relay.promised
        return self._path_latency(pair, relay.relay_peer) if found is None else found

    def _rank_better(self, pair: Pair, through: str) -> tuple[bool, float, str]:
        return through not in pair, self._path_latency(pair, through), through

    def _is_between(self, pair: Pair, through: str) -> bool:
        """Whether both ends reach a relay."""
        if through and all(self._peers[end].rendezvous == through for end in pair):
            return True
        if through == pair[1]:
            return not self._is_needed(pair)
        ends = [end for end in pair if end != through]
        return through in self._peers and all(through in self._peers[end].latencies for end in ends)

    def _can_relay(self, pair: Pair, through: str) -> bool:
        if not self._is_between(pair, through):
            return False
        return through not in self._peers or through == pair[1] or self._peers[through].can_relay

    def _find_relays(self, pair: Pair) -> list[str]:
        """Return the peers that may relay for a pair now, and the rendezvous if both share it."""
        return [
            one
            for one in (*self._peers, self._peers[pair[0]].rendezvous)
            if self._can_relay(pair, one)
            and not self._exclusions.is_excluded(pair, one, self._now)
            and (one not in self._peers or self._relay_count(one) < MAX_OF_PEER)
        ]

    def _open_relay(self, pair: Pair) -> list[RelayAction]:
        fit = self._find_relays(pair)
        if not fit:
            return []
        through = min(fit, key=lambda one: self._rank_relay(pair, one))
        self._relays[pair] = self._make_relay(through)
        return self._request_relay(pair, self._relays[pair])

    def _try_relay(self, pair: Pair, through: str) -> list[RelayAction]:
        """Open a relay beside the used one."""
        self._trials[pair] = self._make_relay(through)
        return self._request_relay(pair, self._trials[pair])

    def _make_relay(self, through: str) -> _Relay:
        secret = self._make_secret()
        # The id is random, since relays that an earlier coordinator opened may still exist.
        id = int.from_bytes(secret[:6], "big")
        now = self._now
        return _Relay(id, through, secret[6:38], secret[38:], now, checked_at=now)

    def _request_relay(self, pair: Pair, relay: _Relay) -> list[RelayAction]:
        through = relay.relay_peer
        if through not in self._peers:  # a rendezvous needs no order
            relay.is_open = True
            return self._announce_relay(pair, relay)
        ends = tuple(dict.fromkeys(one for end in pair for one in self._peers[end].addresses))
        order = OpenRelay(id=relay.id, secret=relay.secret, ends=ends, is_end=through in pair)
        return [SendMessageAction(through, order)]

    def _rank_relay(self, pair: Pair, through: str) -> tuple[bool, bool, float, str]:
        """Return a sort key of a relay for a pair; the best relay has the lowest key.

        Members come before the rendezvous, then the pair's dialing end, then lower latencies.
        """
        is_member = through in self._peers
        return not is_member, through != pair[0], self._path_latency(pair, through), through

    def _path_latency(self, pair: Pair, through: str) -> float:
        return sum(self._peers[end].latencies.get(through, 0.0) for end in pair)

    def _relay_count(self, peer: str) -> int:
        """How many relays are on a peer, including those that connections move to or leave."""
        replaced = [relay for _, relay in self._replaced]
        found = (*self._relays.values(), *self._trials.values(), *replaced)
        return sum(relay.relay_peer == peer for relay in found)

    def _announce_relay(self, pair: Pair, relay: _Relay) -> list[RelayAction]:
        by, to = pair
        is_member = relay.relay_peer in self._peers
        addresses = self._peers[relay.relay_peer].addresses if is_member else ()
        beside = self._relays[pair].id if relay is self._trials.get(pair) else 0

        def make_route(peer: str, dials: bool) -> RelayedRoute:
            return RelayedRoute(
                id=relay.id,
                secret=relay.secret,
                end_secret=relay.end_secret,
                peer=peer,
                role="dials" if dials else "waits",
                addresses=addresses,
                port=relay.port,
                beside=beside,
                is_direct=relay.relay_peer in pair,
            )

        return [
            SendMessageAction(to, make_route(by, False)),
            SendMessageAction(by, make_route(to, True)),
        ]

    def _give_up_relay(self, pair: Pair) -> list[RelayAction]:
        self._exclusions.add_failure(pair, self._relays[pair].relay_peer, self._now)
        return self._close_relay(pair)

    def _end_trial(self, pair: Pair) -> list[RelayAction]:
        """Close a relay that was tried; it is not tried again for a while."""
        trial = self._trials.pop(pair)
        self._pauses.add_failure(pair, trial.relay_peer, self._now)
        return self._order_close(trial, *pair, trial.relay_peer)

    def _close_relay(self, pair: Pair) -> list[RelayAction]:
        out: list[RelayAction] = self._end_trial(pair) if pair in self._trials else []
        relay = self._relays.pop(pair)
        out += self._order_close(relay, *pair, relay.relay_peer)
        if self._is_needed(pair):
            out.append(ConnectionTriedEvent(*pair, succeeded=False))
        return out

    def _order_close(self, relay: _Relay, *peers: str) -> list[RelayAction]:
        """Tell peers that a relay has ended: those that are away once they are back."""
        out: list[RelayAction] = []
        for peer in dict.fromkeys(peers):
            if peer in self._peers:
                out.append(SendMessageAction(peer, CloseRelay(id=relay.id)))
            else:
                self._unclosed.append((peer, relay.id))
        return out

    def _close_missed(self, peer: str) -> list[RelayAction]:
        """Tell a peer that has come back which of its relays have ended meanwhile."""
        missed = [one for one in self._unclosed if one[0] == peer]
        for one in missed:
            self._unclosed.remove(one)
        return [SendMessageAction(peer, CloseRelay(id=id)) for _, id in missed]


def _is_gain(present: float, other: float) -> bool:
    """Whether a path with the ``other`` latency is much shorter; both one way in seconds."""
    return present - other >= max(MIN_GAIN_S, MIN_GAIN * present)
