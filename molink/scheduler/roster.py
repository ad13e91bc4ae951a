"""All jobs of a head, by what can be done with them."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

from molink.errors import InvariantError
from molink.facts.ringtimes import RingTimes
from molink.scheduler.job import Job
from molink.scheduler.leaving import Leaving
from molink.scheduler.ledger import TurnCount
from molink.scheduler.policies.base import Restoring, SchedulingPolicy
from molink.scheduler.prefix import ROOT, Match
from molink.scheduler.shares import FairShares


class Roster:
    """Keeps jobs in exactly one place each: waiting, admitted, or gone.

    It knows which jobs could be admitted, run or preempted; whose turn it is among them, ``policy``
    decides.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._jobs: dict[tuple[str, str], Job] = {}
        self.shares = FairShares()
        #: Those that were preempted, the last one first, then the others as they arrived.
        self._waiting: OrderedDict[Job, None] = OrderedDict()
        #: Tokens of them all, but for those whose KV is in host memory.
        self.waiting_tokens = 0
        #: By request id, which rises with each admission.
        self._admitted: dict[int, Job] = {}
        #: Admitted jobs with known tokens whose rows have still to be issued, oldest first.
        self._prefilling: dict[int, Job] = {}
        #: Decoding jobs that wait for no rows, in the order in which their tokens came back.
        self._idle: dict[int, Job] = {}
        self._leaving: list[Leaving] = []
        self._next_id = 0
        #: Who is to be admitted next, once that has been asked.
        self._first: tuple[Job | None] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    @property
    def admitted(self) -> int:
        """How many jobs are admitted."""
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return len(self._waiting)

    @property
    def queued(self) -> Collection[Job]:
        """The jobs that wait: those that were preempted, then the others as they arrived."""
        return self._waiting.keys()

    @property
    def running(self) -> Collection[Job]:
        """The jobs that are admitted."""
        return self._admitted.values()

    @property
    def places_at_once(self) -> int:
        """For how many that wait others may give way in one iteration."""
        return self._policy.places_at_once

    @property
    def has_prompts(self) -> bool:
        """Whether an admitted job has rows of known tokens to be issued."""
        return bool(self._prefilling)

    @property
    def leaving(self) -> Sequence[Leaving]:
        """The admissions whose release has still to be issued."""
        return self._leaving

    @property
    def queues(self) -> Sequence[int]:
        """How many jobs are in each queue of the policy, if it has queues; the best first."""
        return self._policy.queues()

    def find(self, owner: str, key: str) -> Job | None:
        """The job of a daemon's request."""
        return self._jobs.get((owner, key))

    def of_id(self, request_id: int) -> Job | None:
        """The job that stages know as ``request_id``, unless that admission is over."""
        return self._admitted.get(request_id)

    def owned_by(self, owner: str) -> list[Job]:
        """All jobs of a daemon."""
        return [job for (name, _), job in self._jobs.items() if name == owner]

    # --- whose turn it is -------------------------------------------------------------------------

    def decoding(self, now: float) -> Sequence[Job]:
        """Jobs that take part in decoding, in flight or not, first to be run first.

        Those that wait for their client are not among them.
        """
        jobs = [*self._idle.values(), *self.under_way()]
        return self._policy.running_order([job for job in jobs if not job.stalled], now)

    def prompts(self, now: float, *, closed: bool = False) -> Sequence[Job]:
        """Jobs with rows of known tokens to be issued, first to be run first.

        Among them is the one to be admitted next, unless nobody is to be (``closed``).
        """
        jobs = list(self._prefilling.values())
        new = None if closed else self.first_waiting(now)
        if new is not None:
            jobs.append(new)
        return self._policy.running_order(jobs, now) if jobs else jobs

    def under_way(self) -> Iterator[Job]:
        """Decoding jobs that wait for rows."""
        return (job for job in self._admitted.values() if job.state == "decode" and job.awaited)

    def first_waiting(self, now: float) -> Job | None:
        """The job to be admitted next; those that wait for their client are passed over."""
        if self._first is None:
            able = [job for job in self._waiting if not job.stalled]
            admitted = self._admitted.values()
            ordered = self.shares.order(able)
            self._first = (self._policy.next_admitted(ordered, admitted, now) if able else None,)
        return self._first[0]

    def next_ones(self, now: float) -> Iterator[Job]:
        """Those of the client whose turn it is for whom others may give way, in order."""
        count = self._policy.places_at_once
        if count == 1:
            first = self.first_waiting(now)
            yield from (first,) if first is not None else ()
            return
        able = self.shares.order([job for job in self._waiting if not job.stalled])
        theirs = [job for job in able if job.request.whose == able[0].request.whose]
        ordered = self._policy.running_order(theirs, now)
        yield from sorted(ordered, key=lambda job: job.request.priority)[:count]

    def first_swapped(self, now: float) -> Job | None:
        """The job to be admitted next, if it comes back from host memory.

        Not the one whose turn the policy estimates to come soonest: one that has given way to
        another would come back in its place, and give way again, for ever.
        """
        first = self.first_waiting(now)
        return first if first is not None and first.copy is not None else None

    def farthest(self, now: float) -> list[Job]:
        """Admitted jobs that others go before, the one whose turn comes last first."""
        admitted = list(self._admitted.values())
        turns = self._policy.next_turns(admitted, len(admitted), now)
        later = [job for job in self._policy.running_order(admitted, now) if turns[job] > 0]
        later.reverse()
        return sorted(later, key=turns.__getitem__, reverse=True)

    def swapped(self, now: float) -> Mapping[Job, float]:
        """Jobs in host memory, and seconds until the turn of each, as the policy estimates."""
        jobs = [job for job in self._waiting if job.copy is not None]
        return self._policy.next_turns(jobs, len(self._admitted), now) if jobs else {}

    @property
    def swapped_count(self) -> int:
        """How many jobs are in host memory."""
        return sum(1 for job in self._waiting if job.copy is not None)

    def ask_anew(self) -> None:
        """Time has gone on: what the policy has answered holds no longer."""
        self._first = None

    def victims(self, needy: Job, now: float) -> Iterator[Job]:
        """Who is to give way to ``needy``, which lacks a block or waits to be admitted, in order.

        First those at rest, then those that would give way once their rows have come back. To one
        that waits nobody gives way who would be admitted before it, by shares or priority: he would
        be back at once, and give way again. Nor does anybody who has just been admitted, so that
        whoever is admitted goes on by a row at least.

        Raises:
            InvariantError: the policy names a job that can't be preempted.
        """
        stay = list(self._admitted.values())
        at_rest = [job for job in self._at_rest() if job is not needy]
        yield from self._giving_way(needy, at_rest, stay, now)
        flying = [job for job in stay if job is not needy and job.flight]
        yield from self._giving_way(needy, flying, stay, now)

    def _giving_way(
        self, needy: Job, jobs: list[Job], stay: list[Job], now: float
    ) -> Iterator[Job]:
        """Those of ``jobs``, and of ``stay``, from which they are taken."""
        while (found := self._policy.victim(needy, jobs, stay, now)) is not None:
            if found.job not in jobs:
                key = found.job.request.key
                raise InvariantError(f"job {key} is to be preempted but can't give way")
            jobs.remove(found.job)
            waits = needy.state == "waiting"
            if waits and (found.job.fresh or self._would_be_back(found.job, needy, now)):
                continue
            stay.remove(found.job)
            yield found.job

    def _would_be_back(self, job: Job, needy: Job, now: float) -> bool:
        """Whether ``job``, if it gave way, would be admitted before ``needy``, which waits."""
        two = self.shares.order((job, needy))
        first = self._policy.next_admitted(two, self._admitted.values(), now)
        return not job.stalled and first is job

    def gives_way(self, job: Job, needy: Job, now: float) -> bool:
        """Whether ``job`` would be preempted for ``needy`` if only it could be."""
        return self._policy.victim(needy, [job], self._admitted.values(), now) is not None

    def rests(self, job: Job) -> bool:
        """Whether it has no rows in flight or in a volume that is being composed."""
        return not job.flight and (job.id in self._idle or job.id in self._prefilling)

    def _at_rest(self) -> Iterator[Job]:
        for jobs in (self._idle, self._prefilling):
            yield from (job for job in jobs.values() if not job.flight)

    # --- the queue --------------------------------------------------------------------------------

    def enqueue(self, job: Job, now: float) -> None:
        """A new job waits."""
        self._jobs[job.request.owner, job.request.key] = job
        self.ask_anew()
        self._waiting[job] = None
        self.waiting_tokens += _uncopied(job)
        self.shares.arrived(job)
        self._policy.arrived(job, now)

    def admit(self, job: Job, blocks: list[int], found: Match, restored: int = 0) -> None:
        """A waiting job gets an id and blocks for all its tokens, the first of them found.

        The next ``restored`` ones come from host memory.
        """
        self._no_longer_waits(job)
        job.begin(self._next_id, blocks, found, restored)
        self._next_id += 1
        self._admitted[job.id] = job
        (self._idle if job.state == "decode" else self._prefilling)[job.id] = job
        self.shares.admitted(job)

    def set_restoring(self, seconds: Restoring) -> None:
        """What it takes until a job that gave way is where it was."""
        self._policy.set_restoring(seconds)

    def set_times(self, times: RingTimes) -> None:
        """What stages and links take is known anew."""
        self._policy.set_times(times)

    def issued(self, job: Job, now: float) -> None:
        """The latest rows of ``job`` have gone into a volume."""
        self._policy.issued(job, now)
        self._idle.pop(job.id, None)
        if job.issued == len(job.tokens):
            self._prefilling.pop(job.id, None)
            job.state = "decode"

    def ran(self, job: Job, seconds: float, now: float) -> None:
        """Rows of ``job`` have come back, ``seconds`` after they were issued."""
        self._policy.ran(job, seconds, now)

    def sampled(self, job: Job) -> None:
        """A token of ``job`` has come."""
        self.shares.sampled(job)

    def answered(self, job: Job) -> None:
        """The answer of ``job`` is whole; it is over next."""
        self._policy.answered(job)

    def came_back(self, job: Job) -> None:
        """A sampled token has come back: the job can go on."""
        self._idle[job.id] = job

    def preempt(self, job: Job) -> None:
        """Take an admitted job's blocks; it waits with its tokens so far."""
        self._depart(job, None)
        self.shares.preempted(job)
        job.state = "waiting"
        self._waiting[job] = None
        self._waiting.move_to_end(job, last=False)
        self.waiting_tokens += _uncopied(job)

    def remove(self, job: Job, now: float, trip: TurnCount | None = None) -> None:
        """The job is over, at whatever point it is."""
        del self._jobs[job.request.owner, job.request.key]
        self.shares.over(job)
        if job.state == "waiting":
            self._no_longer_waits(job)
        else:
            self._depart(job, trip)
        job.state = "gone"
        self._policy.over(job, now)

    def take_leaving(self) -> list[Leaving]:
        """The admissions whose release is to be issued now."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def _no_longer_waits(self, job: Job) -> None:
        self.ask_anew()
        del self._waiting[job]
        self.waiting_tokens -= _uncopied(job)

    def _depart(self, job: Job, trip: TurnCount | None) -> None:
        self.ask_anew()
        del self._admitted[job.id]
        self._prefilling.pop(job.id, None)
        self._idle.pop(job.id, None)
        self._leaving.append(Leaving.of(job, trip))
        job.blocks = []
        job.flight = {}
        job.leave_path()
        job.source = -1
        job.node = ROOT

    def validate(self) -> None:
        """Every job is where its state says.

        Raises:
            InvariantError: one is not.
        """
        for job in self:
            inside, waits = self._admitted.get(job.id) is job, job in self._waiting
            if (job.state == "waiting") != waits or inside == waits:
                raise InvariantError(f"job {job.request.key} is {job.state} but not kept as such")
            if inside:
                self._validate_admitted(job)
        if self.waiting_tokens != sum(map(_uncopied, self._waiting)):
            raise InvariantError(f"{self.waiting_tokens} are not the tokens of those that wait")
        if len(self._waiting) + len(self._admitted) != len(self._jobs):
            raise InvariantError("a job is kept that nobody owns")
        if not self._idle.keys() | self._prefilling.keys() <= self._admitted.keys():
            raise InvariantError("a job that is over could still be run")

    def _validate_admitted(self, job: Job) -> None:
        prefilling = job.state == "prefill"
        if prefilling != (job.id in self._prefilling) or prefilling != (
            job.issued < len(job.tokens) and job.id not in self._idle
        ):
            raise InvariantError(f"request {job.id} is in {job.state} with {job.issued} issued")
        if job.state == "decode" and (job.id in self._idle) == bool(job.awaited):
            raise InvariantError(f"request {job.id} is idle and waits for rows, or neither")
        if not job.flight.keys() >= set(job.awaited) or (job.path and not job.awaited):
            raise InvariantError(f"request {job.id} waits for rows that are not in flight")
        if job.announced > len(job.blocks):
            raise InvariantError(f"request {job.id} announced blocks that it doesn't have")


def _uncopied(job: Job) -> int:
    """Tokens that are to be computed before it can go on."""
    return len(job.tokens) - (job.copy.tokens if job.copy is not None else 0)
