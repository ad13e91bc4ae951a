"""Decides whom a peer follows as its coordinator, and when it leads the swarm itself.

No PC is special: every peer holds a replica of the coordinator's state, and each daemon runs one of
these. A *term* numbers the time of one leader. Terms only rise, and no two leaders share one: the
low bits are the leader's own. An epoch holds the term in which it was made in its high bits, so
that what an older leader still says is older everywhere.

Two PCs must do, so there is no majority to ask for. What is guaranteed instead: of peers that reach
each other one leads and the others follow it; a swarm that is split has a leader in each part; once
the parts meet, the leader that more peers follow goes on under a higher term, and the other steps
down. A peer speaks for itself only: that somebody leads is believed of that peer alone, over a
connection under its own key, and how many follow it is what they say themselves.

A plain object: events and ``now`` (monotonic seconds) in, decisions out.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Literal

from molink.swarm.election.leading import (
    Answered,
    Ask,
    ConnectionLost,
    Decision,
    Event,
    Follow,
    Heard,
    Known,
    Lead,
    Led,
    NotLed,
    Raise,
    Resigned,
    Silent,
    StepDown,
    TimePassed,
)
from molink.swarm.terms import MAX_ROUND, next_term, round_of
from molink.wire.messages.leading import LeaderView

#: A coordinator that says nothing for this long, in seconds, is lost.
SILENCE = 3.0
#: The same before a daemon has heard any, for the one that it has started itself: it measures its
#: device and reads its model's files before it turns to it.
FIRST_WORD = 120.0
#: Pause between two rounds of questions while there is nobody to follow, in seconds.
AGAIN = 0.5
#: How often a leader looks for another part of its swarm, in seconds.
PROBE = 2.0
#: Whom it asks each time.
PROBES = 4
#: Whom a peer of more than ``PROBES`` others asks first, beside the leader that it knew; and how
#: often, in seconds, until that has had its time to start: half as often each time. Its connection
#: is tried again anyway.
FEW, SELDOM = 1, 1.0
#: The longest that a peer leaves it to those before it in the order to ask all, in seconds.
YIELD = 3.0
#: How long the peer whose turn it is has to begin to lead, in seconds.
CLAIM = 5.0
#: After its own start a peer gives the leader that it knew so much time to start too, in seconds.
BOOT = 10.0
#: The same while the swarm runs, for a coordinator without a daemon, which nobody can ask.
LONE = 10.0
#: How far above ours, in rounds, a term may be that a single peer names.
MAX_LEAP = 64
#: A leader takes a higher term for the sake of others at most this often, in seconds.
RAISE = 1.0
#: Ticks further apart than this, in seconds, say that this process (or PC) stood still.
STANDSTILL = 2.0
#: After one, answers are waited for anew for this long, in seconds, before this peer leads: what
#: has run out says nothing of the others, whose words may lie in its sockets.
REST = 1.0

#: The version of a replica where there is none: such a peer leads only what it founds.
NO_REPLICA = (0, 0)

Role = Literal["looking", "following", "starting", "leading", "ended"]


class Succession:
    """One peer's part in who leads the swarm."""

    def __init__(
        self,
        me: str,
        now: float,
        *,
        known: Known,
        term: int = 0,
        leader: str = "",
        able: bool = True,
    ) -> None:
        """``term`` and ``leader`` as this peer knew them last; it looks for who leads now.

        One that isn't ``able`` never leads.
        """
        self._me = me
        self._order = known.order
        #: How far the replica is that this peer holds: term, and revision in it.
        self._replica = known.replica
        self.term = term
        #: The peer that leads, or led last; empty for a coordinator without a daemon.
        self.leader = leader
        self.role: Role = "looking"
        self._heard = self._ticked = now
        #: When the next round of questions is due.
        self._round_at = now
        #: Until the round after that, while a leader is given its time to start.
        self._pause = SELDOM
        #: Before this nobody takes the place of a leader that can't be reached.
        self._patience = now if leader == me else now + BOOT + self._yields
        #: The same after a standstill.
        self._rested_at = now
        self._answers: dict[str, LeaderView] = {}
        self._unanswered: set[str] = set()
        #: A leader of a higher term; a round of questions says whom the others follow.
        self._rival = ""
        #: Whose turn it is to lead, and since when.
        self._turn: tuple[str, float] = ("", now)
        #: Peers that didn't lead although it was their turn, and until when they are passed over.
        self._unfit: dict[str, float] = {} if able else {me: math.inf}
        self._raised = now - RAISE
        self._probed = 0
        #: Whether this round of questions is to all: only then this peer may lead.
        self._all_asked = False
        #: The term that this peer is about to lead in, and since when.
        self._coming = (term, now)
        #: Where the coordinator of this PC listens.
        self._own: Led | None = None
        #: Whether any coordinator has been heard yet.
        self._any_heard = False
        self._story: deque[str] = deque(maxlen=64)
        self._out: list[Decision] = []

    # --- what others are told ------------------------------------------------------------------

    def view(self, now: float) -> LeaderView:
        """What this peer answers when it is asked whom it follows."""
        own = self._own if self.role == "leading" else None
        return LeaderView(
            term=self.term,
            leader=self._me if self.role == "starting" else self.leader,
            leads=own is not None,
            hears=self._in_touch(now),
            fit=self.role != "ended" and not self._passed_over(self._me, now),
            replica=self._replica,
            coordinator_key=own.coordinator_key if own is not None else "",
            addresses=own.addresses if own is not None else (),
        )

    def _in_touch(self, now: float) -> bool:
        """Whether there is, or is about to be, a coordinator for this peer."""
        if self.role == "starting":
            return now - self._coming[1] <= CLAIM
        return self.role == "following" and now - self._heard <= SILENCE

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return tuple(self._story)

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(peer for peer in self._order if peer != self._me)

    @property
    def _yields(self) -> float:
        """For how long to leave it to those before in the order to ask all, in seconds.

        It is them who may lead, and who leads tells all others. The first few don't wait.
        """
        before = [peer for peer in self._order if peer != self.leader]
        rank = before.index(self._me) if self._me in before else len(before)
        return min(rank // PROBES * AGAIN, YIELD)

    # --- events --------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take an event; returns what to do, in order."""
        if self.role == "ended":
            return []
        match event:
            case Heard():
                self._hears(event, now)
            case ConnectionLost():
                if self.role == "following":
                    self._look("the connection to the coordinator is lost", now)
            case Known():
                self._knows(event)
            case Answered():
                self._answered(event.peer, event.view, now)
            case Silent(peer):
                self._unanswered.discard(peer)
                self._answers.pop(peer, None)
            case Led():
                self._led(event, now)
            case NotLed():
                self._not_led(now)
            case Resigned():
                self._note(now, "ended")
                self.role = "ended"
            case TimePassed():
                self._tick(now)
        self._conclude(now)
        decisions, self._out = self._out, []
        return decisions

    def _hears(self, event: Heard, now: float) -> None:
        if event.term < self.term:
            return  # of a leader whose time is over
        self._heard, self._any_heard = now, True
        if self.role in ("leading", "starting"):
            return
        if self.role == "looking":
            self._note(now, f"hears {event.leader or 'the coordinator'} in term {event.term}")
            self.role = "following"
        self.term, self.leader = event.term, event.leader

    def _knows(self, event: Known) -> None:
        self._order, self._replica = event.order, event.replica
        self._unanswered &= set(event.order)
        # Who is no member any more has no say in who leads.
        for gone in self._answers.keys() - set(event.order):
            del self._answers[gone]

    def _answered(self, peer: str, view: LeaderView, now: float) -> None:
        self._unanswered.discard(peer)
        if peer not in self._others:
            return
        if round_of(view.term) > min(round_of(self.term) + MAX_LEAP, MAX_ROUND):
            self._note(now, f"{peer} names term {view.term}, which can't be")
            return
        self._answers[peer] = view
        if self.role == "leading":
            self._meet(peer, view, now)
        elif self.role == "looking" and not self._all_asked:
            self._seek(view)

    def _led(self, event: Led, now: float) -> None:
        if self.role not in ("starting", "leading"):
            return
        self.term = max(self.term, self._coming[0], event.term)
        self._note(now, f"leads in term {self.term}")
        self.role, self.leader, self._own, self._heard = "leading", self._me, event, now
        self._out.append(Follow(self._me, self.term, event.coordinator_key, event.addresses))
        self._ask_all(now)  # and so tell them

    def _not_led(self, now: float) -> None:
        if self.role == "leading":
            self._out.append(StepDown())
        self._own = None
        self._unfit[self._me] = now + BOOT
        self._look("the coordinator can't run here", now)

    def _tick(self, now: float) -> None:
        stood_still = now - self._ticked > STANDSTILL
        self._ticked = now
        if stood_still:
            # Nobody could be heard; and another may lead by now.
            self._heard, self._rested_at, self._turn = now, now + REST, ("", now)
            self._round(now)
        elif self.role == "leading":
            if now - self._heard > (2 * SILENCE if self._any_heard else FIRST_WORD):
                self._note(now, "the coordinator here says nothing any more")
                self._heard = now
                self._out.append(Lead(self.term))
            if now >= self._round_at:
                self._probe(now)
        elif self.role == "following" and now - self._heard > SILENCE:
            self._look("the coordinator says nothing any more", now)
        elif self.role != "looking" or now < self._round_at:
            return
        elif not self._unanswered or not self._all_asked:
            self._round(now, some=now < self._patience)

    # --- looking for a leader ------------------------------------------------------------------

    def _look(self, why: str, now: float) -> None:
        self._note(now, why)
        self.role = "looking"
        self._patience = now + self._yields if self.leader else now + LONE
        self._turn, self._pause = ("", now), SELDOM
        self._round(now, some=True)

    def _round(self, now: float, *, some: bool = False) -> None:
        """Ask all; or first ``some``.

        When a swarm starts, or its leader is slow, all PCs look: if each of many asks each other
        one, they are busy with that alone.
        """
        self._answers.clear()
        if some and len(self._others) > PROBES:
            self._ask(self._some(FEW), now)
            self._all_asked = False
            if now < self._patience:
                self._round_at = min(now + self._pause, self._patience)
                self._pause *= 2
        else:
            self._ask_all(now)

    def _ask_all(self, now: float) -> None:
        self._ask(self._others, now)
        self._all_asked = True

    def _ask(self, peers: Iterable[str], now: float) -> None:
        self._round_at = now + AGAIN
        # First the leader that it knew: if that one answers, nobody else need be asked.
        known = [self.leader] if self.leader in self._others else []
        self._unanswered = {*known, *peers}
        self._out += [Ask(peer) for peer in dict.fromkeys((*known, *peers))]

    def _some(self, count: int) -> list[str]:
        """A few others, in turn."""
        others, some = self._others, []
        for _ in range(min(count, len(others))):
            self._probed = (self._probed + 1) % len(others)
            some.append(others[self._probed])
        return some

    def _seek(self, view: LeaderView) -> None:
        """A peer names the leader that it hears: ask that one."""
        known = view.leader in self._answers or view.leader in self._unanswered
        if view.hears and view.leader in self._others and not known:
            self._unanswered.add(view.leader)
            self._out.append(Ask(view.leader))

    def wants(self, peer: str) -> bool:
        """Whether an answer of that peer still counts, which was to be asked."""
        return self.role == "leading" or peer in self._unanswered

    def _conclude(self, now: float) -> None:
        """Do what follows from the answers, if enough have come."""
        if self.role == "leading" and self._rival and not self._unanswered:
            self._contest(now)
        if self.role not in ("looking", "following"):
            return
        leaders = {peer: view for peer, view in self._answers.items() if view.leads}
        found = max(leaders, key=lambda peer: leaders[peer].term, default="")
        if found and self._better(found, leaders[found]):
            self._follow(found, leaders[found], now)
        elif self.role == "looking" and not found and not self._unanswered:
            if self._all_asked:
                self._succeed(now)
            elif now >= self._patience:
                self._round(now)

    def _better(self, leader: str, view: LeaderView) -> bool:
        """Whether to turn to a leader: none below our term, and no other one while ours is heard.

        Leaders settle between themselves which of two goes on.
        """
        if self.role == "looking":
            return view.term >= self.term
        return view.term > self.term and leader == self.leader

    def _follow(self, leader: str, view: LeaderView, now: float) -> None:
        self._note(now, f"turns to {leader}, which leads in term {view.term}")
        self.role, self.term, self.leader, self._heard = "following", view.term, leader, now
        self._answers.clear()
        self._unanswered.clear()
        self._out.append(Follow(leader, view.term, view.coordinator_key, view.addresses))

    def _succeed(self, now: float) -> None:
        """Everybody was asked, and nobody that can be reached leads: whose turn is it?"""
        if now < max(self._patience, self._rested_at) or now - self._ticked > STANDSTILL:
            return  # the old one may still start; or nothing is known of anybody yet
        if any(view.hears for view in self._answers.values()):
            return  # it lives where we can't reach it
        turn = self._next_leader(now)
        if turn == self._me:
            newest = max([self.term, *(view.term for view in self._answers.values())])
            ours = self.leader == self._me and newest == self.term
            self._lead(self.term if ours else next_term(newest, self._me), now)
        elif turn != self._turn[0]:
            self._turn = (turn, now)
        elif turn and now - self._turn[1] > CLAIM:
            self._unfit[turn] = now + BOOT

    def _next_leader(self, now: float) -> str:
        """Who has the newest replica, and of those the first in the order; empty if nobody may."""
        held = {peer: view.replica for peer, view in self._answers.items() if view.fit}
        held[self._me] = self._replica
        able = [
            peer
            for peer in self._order
            if peer in held
            and not self._passed_over(peer, now)
            and (held[peer] != NO_REPLICA or peer == self._me == self.leader)
        ]
        return max(able, key=held.__getitem__, default="")  # the first of equal ones

    def _passed_over(self, peer: str, now: float) -> bool:
        return now < self._unfit.get(peer, now)

    def _lead(self, term: int, now: float) -> None:
        lost = self.leader if self.leader != self._me else ""
        self._note(now, f"is to lead in term {term}")
        self.role, self._coming, self._rival = "starting", (term, now), ""
        self._out.append(Lead(term, lost))

    # --- leading -------------------------------------------------------------------------------

    def _probe(self, now: float) -> None:
        """Ask a few, in turn: one that can't be reached now may lead another part later."""
        self._round_at = now + PROBE
        self._out += [Ask(peer) for peer in self._some(PROBES)]

    def _meet(self, peer: str, view: LeaderView, now: float) -> None:
        """A peer says whom it follows; see whether it is of another part of the swarm."""
        if view.leads and view.term > self.term:
            if not self._rival:
                self._note(now, f"{peer} leads in term {view.term}")
                self._rival = peer
                self._ask_all(now)
        elif not view.leads and not view.hears and view.term > self.term:
            self._raise(view.term, now)  # so that it may follow
        elif view.hears and view.leader in self._others and not self._rival:
            self._out.append(Ask(view.leader))

    def _contest(self, now: float) -> None:
        """All have answered who can: the leader that more of them follow goes on."""
        rival, self._rival = self._rival, ""
        view = self._answers.get(rival)
        if view is None or not view.leads or view.term <= self.term:
            return
        followed = [one.leader for one in self._answers.values() if one.hears]
        ours, theirs = followed.count(self._me), followed.count(rival)
        first = self._order.index(self._me) < self._order.index(rival)
        if (ours, first) > (theirs, not first):
            self._raise(view.term, now)
            return
        self._note(now, f"steps down: {theirs} follow {rival}, {ours} follow this peer")
        self._own = None
        self._out.append(StepDown())
        self._follow(rival, view, now)

    def _raise(self, above: int, now: float) -> None:
        """Go on leading in a term above another one."""
        if now - self._raised >= RAISE:
            self._raised, self.term = now, next_term(above, self._me)
            self._note(now, f"goes on in term {self.term}")
            self._out.append(Raise(self.term))

    # --- small things --------------------------------------------------------------------------

    def _note(self, now: float, text: str) -> None:
        self._story.append(f"{now:.1f} {text}")
