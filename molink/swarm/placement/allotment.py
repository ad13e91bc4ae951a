"""Shares the peers out among deployments: which of them may use which.

Each peer is for one deployment. What serves keeps its peers; one that lacks room takes those that
nobody uses, the models' first deployments before the second ones and large models before small
ones, and each no more than it needs while another lacks some. What is over goes to those that have
least for their size. Devices of one PC go to the same deployment where there is a choice, so that
its loss is that of one. Only a deployment that has lacked room for a while takes peers of those
that serve, if these have room without them. What nobody uses yet is exchanged then, so that near
peers are together (:mod:`molink.swarm.placement.exchange`). Plain functions of what there is and
what was so far: the same gives the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from molink.facts.footprint import Footprint, StageSetup
from molink.facts.memory_plan import usable as usable_bytes
from molink.swarm.controller.records import Desired
from molink.swarm.placement.exchange import Exchange
from molink.swarm.placement.links import Links
from molink.swarm.placement.partition import Runner, StageCosts
from molink.swarm.placement.placement import (
    ASSUMED_RATE,
    MAX_STAGES,
    Candidate,
    Placement,
    misfit,
    place,
)

#: A deployment: the model's name, and its number among those of the model.
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Need:
    """A deployment: the peers that it ``holds`` at present, and whether it ``serves``.

    ``pressing``: it has lacked room for so long that others have to make some.
    """

    key: Key
    desired: Desired
    holds: frozenset[str] = frozenset()
    serves: bool = False
    pressing: bool = False

    @property
    def size(self) -> int:
        """Bytes of the model's layers."""
        return self.desired.facts.layers * self.desired.facts.layer_bytes


def allot(
    needs: Sequence[Need],
    offers: Iterable[Candidate],
    before: Mapping[str, Key],
    links: Links | None = None,
) -> dict[str, Key]:
    """Who may use which peer; peers that nobody may use are left out.

    ``offers`` in the order of joining; ``before`` is the last answer. Without ``links`` room alone
    decides.
    """
    found = _Allotment(needs, offers, before)
    owner = found.make()
    return owner if links is None else found.exchanged(links)


def fits(desired: Desired, offers: Iterable[Candidate]) -> bool:
    """Whether a model has room on these peers; links aside.

    As a placement would find it, but quicker.
    """
    pins = dict(desired.pins)
    usable = [pinned(one, pins) for one in offers if not pins or one.peer in pins]
    usable = [one for one in usable if not misfit(one.stage, desired.facts)]
    if any(one.stage != "auto" for one in usable):
        found = place(desired.facts, usable, desired.dtype, desired.quantize)
        return isinstance(found, Placement)
    layers = desired.facts.layers
    runners = [_runner(desired, one) for one in usable]
    if any(one.capacity(opens=True, closes=True) >= layers for one in runners):
        return True
    runners = sorted(runners, key=lambda one: -one.capacity())[:MAX_STAGES]
    for first, last in permutations(runners, 2) if layers > 1 else ():
        ends = first.capacity(opens=True), last.capacity(closes=True)
        rest = sum(max(0, one.capacity()) for one in runners if one not in (first, last))
        if min(ends) >= 1 and sum(ends) + rest >= layers:
            return True
    return False


def _runner(desired: Desired, offer: Candidate) -> Runner:
    """What a peer has, and what the model takes there."""
    setup = StageSetup(
        dtype=desired.dtype,
        quantize=desired.quantize,
        kind="cuda" if offer.cuda else "cpu",
        bf16=offer.bf16,
        blocks=offer.blocks,
        narrow=offer.narrow,
    )
    costs = StageCosts.of(Footprint.of(desired.facts, setup))
    return Runner(offer.peer, usable_bytes(offer.memory), ASSUMED_RATE, costs)


def pinned(offer: Candidate, pins: Mapping[str, str]) -> Candidate:
    """What a peer offers to a model that is bound to it."""
    stage = pins.get(offer.peer, "auto")
    return offer if stage == "auto" else replace(offer, stage=stage)


class _Allotment:
    """One call of :func:`allot`."""

    def __init__(
        self, needs: Sequence[Need], offers: Iterable[Candidate], before: Mapping[str, Key]
    ) -> None:
        self.needs = {need.key: need for need in needs}
        self.offers = {one.peer: one for one in offers}
        self.before = before
        self.owner: dict[str, Key] = {}
        self.bound = {peer: need.key[0] for need in needs for peer, _ in need.desired.pins}
        self.urgent = sorted(needs, key=lambda need: (need.key[1], -need.size, need.key))

    def make(self) -> dict[str, Key]:
        self.keep()
        lacking = [need for need in self.urgent if not self.has_room(need) and not self.grow(need)]
        lacking = [need for need in lacking if not (need.pressing and self.displace(need))]
        for need in lacking:
            if need.key[1] == 0:  # what is there waits with it for what is missing
                self.give(need, self.free(need))
        for need in self.urgent:
            missing = need.desired.stages - len(self.of(need))
            if missing > 0 and self.has_room(need):
                self.give(need, self.ordered(need, self.free(need), -1)[:missing])
        self.share_rest()
        return self.owner

    def exchanged(self, links: Links) -> dict[str, Key]:
        """The same, with near peers together: what is used, or was promised, stays."""
        used = frozenset[str]().union(*(need.holds for need in self.needs.values()))
        models = {need.key: need.desired for need in self.needs.values()}
        exchange = Exchange(
            models, self.offers, links, lambda key, peer: self.may_use(self.needs[key], peer)
        )
        return exchange.improve(self.owner, self.offers.keys() - used)

    # --- what there is ---------------------------------------------------------------------------

    def of(self, need: Need) -> list[str]:
        return [peer for peer, key in self.owner.items() if key == need.key]

    def free(self, need: Need) -> list[str]:
        """Peers that nobody has and that it may use."""
        return [peer for peer in self.offers if peer not in self.owner and self.may_use(need, peer)]

    def may_use(self, need: Need, peer: str) -> bool:
        bound = self.bound.get(peer)
        return bound == need.key[0] or (bound is None and not need.desired.pins)

    def ordered(
        self, need: Need, peers: Iterable[str], sign: int, more: Iterable[str] = ()
    ) -> list[str]:
        """First those that it had; then by memory, the smallest first, or the largest (-1).

        Before memory comes whose PCs they are: its own (with ``more``), nobody's, others'.
        """
        own = {self.pc(peer) for peer in (*self.of(need), *more)}
        used = {self.pc(peer) for peer in self.owner}

        def apart(peer: str) -> int:
            return 0 if self.pc(peer) in own else 1 if self.pc(peer) not in used else 2

        return sorted(
            peers,
            key=lambda peer: (
                self.before.get(peer) != need.key,
                apart(peer),
                sign * self.offers[peer].memory,
            ),
        )

    def pc(self, peer: str) -> str:
        return self.offers[peer].pc or peer

    def has_room(self, need: Need, *more: str, without: str = "") -> bool:
        peers = [peer for peer in (*self.of(need), *more) if peer != without]
        return fits(need.desired, [self.offers[peer] for peer in peers])

    def give(self, need: Need, peers: Iterable[str]) -> None:
        self.owner.update(dict.fromkeys(peers, need.key))

    # --- who gets it -----------------------------------------------------------------------------

    def keep(self) -> None:
        """What is used stays where it is, unless it was promised to another one that lacks it."""
        for need in self.urgent:
            self.give(need, (peer for peer in self.offers if peer in need.holds))
        for peer, key in self.before.items():
            holder = self.needs.get(self.owner.get(peer, ("", 0)))
            if holder is None or key not in self.needs or holder.key == key:
                continue
            if not self.needs[key].serves and self.has_room(holder, without=peer):
                self.owner[peer] = key

    def grow(self, need: Need) -> bool:
        """Give it what it needs of the free peers: the smallest that is enough, else the largest.

        None if all aren't enough.
        """
        free = self.free(need)
        for peer in self.ordered(need, free, 1):
            if self.has_room(need, peer):
                self.give(need, [peer])
                return True
        taken: list[str] = []
        while free:
            peer = self.ordered(need, free, -1, taken)[0]
            free.remove(peer)
            taken.append(peer)
            if self.has_room(need, *taken):
                self.give(need, taken)
                return True
        return False

    def displace(self, need: Need) -> bool:
        """Take peers of others that have room without them."""
        before = dict(self.owner)
        self.give(need, self.free(need))
        donors = [one for one in self.urgent if one.key != need.key and one.serves]
        for donor in sorted(donors, key=lambda one: -len(self.of(one))):
            for peer in self.ordered(need, self.of(donor), 1):
                if not (self.may_use(need, peer) and self.has_room(donor, without=peer)):
                    continue
                self.owner[peer] = need.key
                if self.has_room(need):
                    self.give_back(need, before)
                    return True
        self.owner = before
        return False

    def give_back(self, need: Need, before: Mapping[str, Key]) -> None:
        """What turns out not to be needed goes to where it was."""
        for peer in self.of(need):
            if before.get(peer) == need.key or not self.has_room(need, without=peer):
                continue
            del self.owner[peer]
            if peer in before:
                self.owner[peer] = before[peer]

    def share_rest(self) -> None:
        """What is over makes rings better, or is at hand when a peer is lost."""
        for peer in self.offers:
            if peer in self.owner:
                continue
            able = [
                need
                for need in self.urgent
                if self.may_use(need, peer)
                and len(self.of(need)) < MAX_STAGES
                and self.has_room(need)
            ]
            had = [need for need in able if need.key == self.before.get(peer)]
            if able:
                pc = self.pc(peer)
                near = [need for need in able if pc in map(self.pc, self.of(need))]
                self.give(had[0] if had else min(near or able, key=self.supply), [peer])

    def supply(self, need: Need) -> float:
        """Memory that it has, for its size."""
        memory = sum(self.offers[peer].memory for peer in self.of(need))
        return memory / max(1, need.size)
