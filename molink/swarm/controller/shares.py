"""Which deployment may use which peer at present, and when that is decided anew.

:mod:`molink.swarm.placement.allotment` decides it; here is what it is decided by, and what each
deployment is told of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from molink.swarm.controller.commons import Commons
from molink.swarm.controller.planner import differ, offer_of
from molink.swarm.controller.reconciler import Reconciler
from molink.swarm.placement.allotment import Key, Need, allot, fits
from molink.swarm.placement.placement import Candidate

#: One that lacks room while others have more than they need waits so long, in seconds, before it
#: takes some of theirs: who is away may be back.
PRESSING = 5.0


class Shares:
    """The peers of each deployment; one for each run of the control plane."""

    def __init__(self, commons: Commons) -> None:
        self._commons = commons
        self._deployments: Mapping[Key, Reconciler] = {}
        #: Whose are which peers, where there is a choice; and what that was decided by.
        self._owner: dict[str, Key] = {}
        self._decided_by: tuple[tuple[Candidate, ...], tuple[Need, ...]] | None = None
        #: Since when deployments that don't stand have had too little room.
        self._lacking: dict[Key, float] = {}

    def lacks(self, key: Key) -> bool:
        """Whether a deployment has too little room on the peers that it may use."""
        return key in self._lacking

    def allot(self, deployments: Mapping[Key, Reconciler], now: float) -> None:
        """Share the peers out anew, if there is another reason than before to do so."""
        self._deployments = deployments
        self._lacking = {key: at for key, at in self._lacking.items() if key in deployments}
        several = len(deployments) > 1
        for key, one in deployments.items():
            one.label = called(key) if several else ""
        if not several and not any(one.desired.pins for one in deployments.values()):
            for one in deployments.values():
                one.allot(None)
            self._owner, self._decided_by = {}, None
            return
        offers = self._offers(now)
        needs = tuple(self._need(key, one, offers, now) for key, one in deployments.items())
        if self._is_news(offers, needs):
            self._decide(offers, needs, now)
        self._tell()

    def _is_news(self, offers: tuple[Candidate, ...], needs: tuple[Need, ...]) -> bool:
        if self._decided_by is None:
            return True
        if needs != self._decided_by[1] or differ(offers, self._decided_by[0]):
            return True
        # Until it is placed, which takes a moment, links may still say who is near.
        unplaced = any(not need.holds and not self.lacks(need.key) for need in needs)
        return self._commons.links.news and unplaced

    def _decide(self, offers: tuple[Candidate, ...], needs: tuple[Need, ...], now: float) -> None:
        self._decided_by = offers, needs
        self._commons.links.placed()
        owner = allot(needs, offers, self._owner, self._commons.links)
        if owner != self._owner:
            names = {key: self._names(owner, key) for key in self._deployments}
            shares = "; ".join(f"{called(key)}: {peers}" for key, peers in names.items())
            self._commons.note(now, f"peers are shared out: {shares}")
        self._owner = owner

    def _tell(self) -> None:
        """A peer that another one still uses is there for nobody else until that lets go of it."""
        for key, one in self._deployments.items():
            others = (two.used for two in self._deployments.values() if two is not one)
            busy = frozenset[str]().union(*others)
            mine = frozenset(peer for peer, owner in self._owner.items() if owner == key)
            one.allot(mine - busy)

    def _offers(self, now: float) -> tuple[Candidate, ...]:
        """Peers with something to offer that nothing speaks against."""
        registry, reach = self._commons.registry, self._commons.reach
        used = frozenset[str]().union(*(one.used for one in self._deployments.values()))
        blocked = self._commons.backoff.blocked
        found = [
            offer
            for peer in registry.members
            if (session := registry.sessions.get(peer)) is not None
            and (peer in used or not blocked(peer, now))
            and (offer := offer_of(peer, session.report)) is not None
        ]
        if reach.failed:
            found = [replace(one, blocked=reach.blocked(one.peer)) for one in found]
        out = reach.left_out(
            one.peer for one in sorted(found, key=lambda one: one.peer not in used)
        )
        return tuple(one for one in found if one.peer in used or one.peer not in out)

    def _need(self, key: Key, one: Reconciler, offers: Sequence[Candidate], now: float) -> Need:
        mine = one.used | {peer for peer, owner in self._owner.items() if owner == key}
        if one.formation is not None or fits(
            one.desired, (offer for offer in offers if offer.peer in mine)
        ):
            self._lacking.pop(key, None)
        else:
            self._lacking.setdefault(key, now)
        since = self._lacking.get(key)
        pressing = since is not None and now - since >= PRESSING
        return Need(key, one.desired, one.used, one.ready, pressing)

    def _names(self, owner: Mapping[str, Key], key: Key) -> str:
        name = self._commons.registry.name
        return ", ".join(name(peer) for peer, whose in owner.items() if whose == key) or "none"


def called(key: Key) -> str:
    """A deployment's name for a person."""
    return key[0] if key[1] == 0 else f"{key[0]} #{key[1] + 1}"
