"""All jobs of a head, by what can be done with them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.errors import InvariantError
from molink.head.job import Job
from molink.head.ledger import TurnCount
from molink.head.policies.base import SchedulingPolicy
from molink.head.prefix import ROOT, Match


@dataclass(frozen=True, slots=True)
class Leaving:
    """An admission that is over and whose release has still to be issued.

    The first ``computed`` of ``tokens`` are in ``blocks`` at every stage, and the first ``depth``
    of the blocks on the prefix tree's path to ``node``; unless it is ``sound``, nothing of that can
    be relied on. ``source`` is a block that rows in flight copy from, -1 if none.
    """

    id: int
    blocks: tuple[int, ...]
    last: int
    also: tuple[int, ...]
    trip: TurnCount | None
    tokens: Sequence[int]
    computed: int
    node: int
    depth: int
    source: int = -1
    sound: bool = True

    @property
    def holds(self) -> tuple[int, ...]:
        """All blocks that it has a reference to."""
        return self.blocks if self.source < 0 else (*self.blocks, self.source)


class Roster:
    """Keeps jobs in exactly one place each: waiting in the policy, admitted, or gone."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self._jobs: dict[tuple[str, str], Job] = {}
        #: By request id, which rises with each admission.
        self._admitted: dict[int, Job] = {}
        #: Admitted jobs with known tokens whose rows have still to be issued, oldest first.
        self._prefilling: dict[int, Job] = {}
        #: Decoding jobs with nothing in flight, in the order in which their tokens came back.
        self._idle: dict[int, Job] = {}
        self._leaving: list[Leaving] = []
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    @property
    def admitted(self) -> int:
        """How many jobs are admitted."""
        return len(self._admitted)

    @property
    def leaving(self) -> Sequence[Leaving]:
        """The admissions whose release has still to be issued."""
        return self._leaving

    def find(self, owner: str, key: str) -> Job | None:
        """The job of a daemon's request."""
        return self._jobs.get((owner, key))

    def of_id(self, request_id: int) -> Job | None:
        """The job that stages know as ``request_id``, unless that admission is over."""
        return self._admitted.get(request_id)

    def owned_by(self, owner: str) -> list[Job]:
        """All jobs of a daemon."""
        return [job for (name, _), job in self._jobs.items() if name == owner]

    def decoding(self) -> int:
        """Jobs that take part in decoding: those that wait for their client do not count."""
        return sum(job.state == "decode" and not job.stalled for job in self._admitted.values())

    def runnable(self) -> list[Job]:
        """Jobs that could take a decode step now."""
        return [job for job in self._idle.values() if not job.stalled]

    def prefilling(self) -> list[Job]:
        """Jobs with rows of known tokens to be issued, oldest first."""
        return list(self._prefilling.values())

    def first_waiting(self) -> Job | None:
        """The job to be admitted next: the first one of the owner with the fewest admitted jobs.

        Those that wait for their client are passed over.
        """
        able = [job for job in self.policy.waiting() if not job.stalled]
        if not able:
            return None
        running = Counter(job.request.owner for job in self._admitted.values())
        return min(able, key=lambda job: running[job.request.owner])

    def displaced_by(self, owner: str, now: float) -> Job | None:
        """The waiting job whose place in the full queue a new one of ``owner`` gets, if any.

        One that its client has abandoned; else, if somebody holds at least two places more than
        ``owner``, one of his that waits for its client, or his last. So the owners who want in
        come to have equal shares, and one who is alone has them all.
        """
        waiting = list(self.policy.waiting())
        abandoned = next((job for job in waiting if job.abandoned(now)), None)
        held = Counter(job.request.owner for job in waiting)
        maximum = max(held, key=held.__getitem__, default=owner)
        if abandoned is not None or held[maximum] < held[owner] + 2:
            return abandoned
        theirs = [job for job in reversed(waiting) if job.request.owner == maximum]
        return next((job for job in theirs if job.stalled), theirs[0])

    def longest_stalled(self) -> Job | None:
        """The admitted job that has waited longest for its client."""
        stalled = [job for job in self._idle.values() if job.stalled]
        return min(stalled, key=lambda job: job.stalled_at, default=None)

    def all_stalled(self) -> bool:
        """Whether every admitted job waits for its client."""
        return all(job.stalled and job.id in self._idle for job in self._admitted.values())

    def victim(self, younger_than: int) -> Job | None:
        """Whom to preempt: one that waits for its client, else the latest admitted.

        Only jobs with nothing in flight, and (unless they wait for their client) only those
        admitted after request id ``younger_than``, so that the oldest always goes on.
        """
        latest = None
        for job in reversed(self._admitted.values()):
            if job.flight or (job.state == "decode" and job.id not in self._idle):
                continue
            if job.stalled:
                return job
            if latest is None and job.id > younger_than:
                latest = job
        return latest

    def enqueue(self, job: Job, now: float) -> None:
        """A new job waits."""
        self._jobs[job.request.owner, job.request.key] = job
        self.policy.push(job, now)

    def admit(self, job: Job, blocks: list[int], found: Match) -> None:
        """A waiting job gets blocks for all its tokens, the first of them found, and an id."""
        self.policy.discard(job)
        job.begin(self._next_id, blocks, found)
        self._next_id += 1
        self._admitted[job.id] = self._prefilling[job.id] = job

    def issued(self, job: Job) -> None:
        """The latest rows of ``job`` have gone into a volume."""
        self._idle.pop(job.id, None)
        if job.issued == len(job.tokens):
            self._prefilling.pop(job.id, None)
            job.state = "decode"

    def came_back(self, job: Job) -> None:
        """A sampled token has come back: the job can go on."""
        self._idle[job.id] = job

    def preempt(self, job: Job, now: float) -> None:
        """Take an admitted job's blocks; it waits with its tokens so far."""
        self._depart(job, None)
        job.state = "waiting"
        self.policy.push_back(job, now)

    def remove(self, job: Job, trip: TurnCount | None = None) -> None:
        """The job is over, at whatever point it is."""
        del self._jobs[job.request.owner, job.request.key]
        if job.state == "waiting":
            self.policy.discard(job)
        else:
            self._depart(job, trip)
        job.state = "gone"

    def take_leaving(self) -> list[Leaving]:
        """The admissions whose release is to be issued now."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def _depart(self, job: Job, trip: TurnCount | None) -> None:
        del self._admitted[job.id]
        self._prefilling.pop(job.id, None)
        self._idle.pop(job.id, None)
        self._leaving.append(
            Leaving(
                job.id,
                tuple(job.blocks),
                job.last,
                tuple(sorted(job.flight.keys() - {job.last})),
                trip,
                job.tokens,
                job.computed,
                job.node,
                job.depth,
                job.source,
                job.sound,
            )
        )
        job.blocks = []
        job.flight = {}
        job.source = -1
        job.node = ROOT

    def validate(self) -> None:
        """Every job is where its state says.

        Raises:
            InvariantError: one is not.
        """
        waiting = list(self.policy.waiting())
        if len(waiting) != len(set(waiting)) or len(waiting) != len(self.policy):
            raise InvariantError("the policy holds a job twice")
        for job in self:
            inside = self._admitted.get(job.id) is job
            if (job.state == "waiting") != (job in waiting) or inside == (job in waiting):
                raise InvariantError(f"job {job.request.key} is {job.state} but not kept as such")
            if inside:
                self._validate_admitted(job)
        if len(waiting) + len(self._admitted) != len(self._jobs):
            raise InvariantError("a job is kept that nobody owns")
        if not self._idle.keys() | self._prefilling.keys() <= self._admitted.keys():
            raise InvariantError("a job that is over could still be run")

    def _validate_admitted(self, job: Job) -> None:
        prefilling = job.state == "prefill"
        if prefilling != (job.id in self._prefilling) or prefilling != (
            job.issued < len(job.tokens) and job.id not in self._idle
        ):
            raise InvariantError(f"request {job.id} is in {job.state} with {job.issued} issued")
        if job.state == "decode" and (job.id in self._idle) == bool(job.flight):
            raise InvariantError(f"request {job.id} is idle with rows in flight, or neither")
        if job.announced > len(job.blocks):
            raise InvariantError(f"request {job.id} announced blocks that it doesn't have")
