"""Whose turn it is to be admitted: daemons have equal shares, and so have the clients of each.

A virtual token counter (VTC; Sheng et al., "Fairness in Serving Large Language Models", 2024,
algorithm 2) of each sums up what was served to it. Who has the least goes next. Names of clients
are their daemon's word, so they count within its share only: to invent some gains it nothing.

*Bound* (their theorem 4.4, with what a head admits). Let ``U`` be ``W_INPUT`` times the longest
prompt plus ``W_OUTPUT`` times the tokens that one's running requests can still generate: at most
``max_running`` answers. Of two daemons that both have requests waiting all the time, or two clients
of one daemon, neither is served more than ``2 U`` units beyond the other. That is wherever the
policy takes them as they are ordered here; one with levels does so within a level.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from molink.scheduler.job import Job

#: What a prompt token that the prefix cache lacks counts, and a generated one: the paper's weights.
W_INPUT, W_OUTPUT = 1, 2
#: Names without requests of which it is known that they had more than their share.
MAX_IDLE = 256


@dataclass(slots=True)
class _Account:
    #: What was served to it.
    units: int
    waiting: int = 0
    running: int = 0


class Counters:
    """The virtual token counters of some names that share alike."""

    def __init__(self) -> None:
        #: Of all that have requests.
        self._active: dict[str, _Account] = {}
        #: Units of some that have none, who left last at the end.
        self._idle: OrderedDict[str, int] = OrderedDict()
        #: The most that one had when it was its turn: as much is taken to have been served to all.
        self._floor = 0

    def __contains__(self, name: str) -> bool:
        return name in self._active or name in self._idle

    def __len__(self) -> int:
        return len(self._active) + len(self._idle)

    @property
    def active(self) -> int:
        """How many have requests."""
        return len(self._active)

    def units(self, name: str) -> int:
        """What was served to one that has requests."""
        return self._active[name].units

    def on_arrival(self, name: str) -> int:
        """Its units once another request waits; who has none waiting has saved up nothing."""
        account = self._active.get(name)
        if account is not None and account.waiting:
            return account.units
        others = [each.units for each in self._active.values() if each.waiting]
        own = self._idle.get(name, 0) if account is None else account.units
        return max(own, self._floor, min(others, default=0))

    def arrived(self, name: str) -> None:
        """A request waits."""
        units = self.on_arrival(name)
        account = self._active.setdefault(name, _Account(units))
        self._idle.pop(name, None)
        account.units = units
        account.waiting += 1

    def ahead(self, name: str, backlog: Mapping[str, float]) -> float:
        """Units of ``backlog``, by name, that are served before a new request of ``name``."""
        own = backlog.get(name, 0.0)
        until = self.on_arrival(name) + own
        others = (
            min(units, max(0.0, until - self._active[other].units))
            for other, units in backlog.items()
            if other != name
        )
        return own + sum(others)

    def admitted(self, name: str) -> None:
        """A request that waited runs."""
        account = self._active[name]
        account.units = self._floor = max(self._floor, account.units)
        account.waiting -= 1
        account.running += 1

    def preempted(self, name: str) -> None:
        """A request that ran waits again."""
        account = self._active[name]
        account.running -= 1
        account.waiting += 1

    def served(self, name: str, units: int) -> None:
        """A request that runs has been served."""
        self._active[name].units += units

    def over(self, name: str, *, waited: bool) -> list[str]:
        """A request is over; returns the names that nothing is known of any more."""
        account = self._active[name]
        account.waiting -= waited
        account.running -= not waited
        if account.waiting or account.running:
            return []
        del self._active[name]
        if account.units <= self._floor:  # it would be lifted as far
            return [name]
        self._idle[name] = account.units
        return [self._idle.popitem(last=False)[0]] if len(self._idle) > MAX_IDLE else []


class FairShares:
    """The counters of daemons, and of the clients of each."""

    def __init__(self) -> None:
        self._owners = Counters()
        self._clients: dict[str, Counters] = {}
        #: Units that were served to all together, and tokens among them that were generated.
        self.total = self.generated = 0

    @property
    def clients(self) -> int:
        """How many clients have requests."""
        return sum(counters.active for counters in self._clients.values())

    @property
    def remembered(self) -> int:
        """Counters that are kept."""
        return len(self._owners) + sum(map(len, self._clients.values()))

    def order(self, waiting: Iterable[Job]) -> list[Job]:
        """``waiting`` by whose turn it is.

        The requests of a client come by :attr:`Job.turn`, then as given; so do names with equals.
        """
        shared: dict[str, dict[str, list[Job]]] = {}
        for job in waiting:
            request = job.request
            shared.setdefault(request.owner, {}).setdefault(request.client, []).append(job)
        ordered: list[Job] = []
        for owner in sorted(shared, key=self._owners.units):
            for client in sorted(shared[owner], key=self._clients[owner].units):
                ordered += sorted(shared[owner][client], key=lambda job: job.turn)
        return ordered

    def ahead(self, new: Job, backlog: Iterable[tuple[Job, float]]) -> float:
        """Units that are served before ``new``, if those are still to be."""
        request = new.request
        shared: dict[str, dict[str, float]] = {request.owner: {}}
        me = request.whose
        for job, units in backlog:
            owner, client = job.request.owner, job.request.client
            if (owner, client) != me or job.turn <= new.turn:
                theirs = shared.setdefault(owner, {})
                theirs[client] = theirs.get(client, 0.0) + units
        counters = self._clients.get(request.owner, Counters())
        sums = {owner: sum(theirs.values()) for owner, theirs in shared.items()}
        sums[request.owner] = counters.ahead(request.client, shared[request.owner])
        return self._owners.ahead(request.owner, sums)

    def arrived(self, job: Job) -> None:
        """A new request waits."""
        owner = job.request.owner
        self._owners.arrived(owner)
        self._clients.setdefault(owner, Counters()).arrived(job.request.client)

    def admitted(self, job: Job) -> None:
        """A request runs; the first time its prompt counts, as far as it has to be computed."""
        owner, client = job.request.owner, job.request.client
        self._owners.admitted(owner)
        self._clients[owner].admitted(client)
        if job.admissions == 1:
            self._serve(job, W_INPUT * (len(job.tokens) - job.reused))

    def sampled(self, job: Job) -> None:
        """A request that runs got a token."""
        self.generated += 1
        self._serve(job, W_OUTPUT)

    def preempted(self, job: Job) -> None:
        """A request that ran waits again; what is computed anew for that counts for nobody."""
        self._owners.preempted(job.request.owner)
        self._clients[job.request.owner].preempted(job.request.client)

    def over(self, job: Job) -> None:
        """A request is over, while ``job.state`` still tells where it was."""
        owner, waited = job.request.owner, job.state == "waiting"
        self._clients[owner].over(job.request.client, waited=waited)
        for forgotten in self._owners.over(owner, waited=waited):
            del self._clients[forgotten]

    def _serve(self, job: Job, units: int) -> None:
        owner = job.request.owner
        self.total += units
        self._owners.served(owner, units)
        self._clients[owner].served(job.request.client, units)
