"""The head of a pipeline: its requests, from submission to the last token."""

from collections.abc import Callable, Mapping, Sequence

from molink.errors import InvariantError, MolinkError, Overloaded, RequestError
from molink.facts.costs import Costs
from molink.facts.drafts import DraftOrder, Guesses
from molink.facts.ringtimes import RingTimes
from molink.facts.story import Story
from molink.routing.report import CacheReport
from molink.scheduler.admission import Admission
from molink.scheduler.batch import Batch
from molink.scheduler.batcher import Batcher
from molink.scheduler.cache import BlockCache
from molink.scheduler.invariants import audit
from molink.scheduler.job import Job
from molink.scheduler.ledger import Ledger
from molink.scheduler.limits import HeadLimits
from molink.scheduler.policies.base import SchedulingPolicy
from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.request import Emission, HeadRequest
from molink.scheduler.roster import Roster
from molink.scheduler.speculation.base import DraftSource
from molink.scheduler.speculation.lookup import PromptLookup
from molink.scheduler.speculation.path import are_due, compare, go_on
from molink.scheduler.speculation.speculation import Speculation
from molink.scheduler.stats import HeadStats
from molink.scheduler.swapping import Swapping
from molink.scheduler.waits import Waits
from molink.wire.messages.data import Admit, Choice, Rows, Sampled, TopLogprobs
from molink.wire.messages.load import HeadLoad
from molink.wire.messages.serving import FinishReason, Rejected, Token

#: Why the last stage has no token for a request, as far as is known here.
_NO_TOKEN = (
    "a stage could not compute this request (its logits were unusable, or its grammar is too"
    " complex: that PC's log says which)"
)

#: Alternatives that came with sampled tokens, by (request id, position).
Tops = Mapping[tuple[int, int], TopLogprobs]


class Head:
    """Schedules the requests of one pipeline during one epoch. Sans-IO; a new epoch, a new head.

    ``next`` is to be called whenever stage 0 can take a micro-batch and after every event while it
    is idle; what it returns goes to stage 0's scoreboard in order. What comes out of the tail goes
    to ``sampled``, ``tombstone`` and ``released``. ``now`` is in seconds of any monotonic clock.
    Whose turn it is ``policy`` decides (first come, first served if none is given); ``source``
    makes what guesses the tokens of a request.
    """

    def __init__(
        self,
        limits: HeadLimits,
        epoch: int,
        policy: SchedulingPolicy | None = None,
        source: Callable[[], DraftSource] = PromptLookup,
    ) -> None:
        self.limits = limits
        self.epoch = epoch
        self._cache = BlockCache(limits)
        policy = policy if policy is not None else Fcfs()
        policy.set_room(limits.blocks * limits.block_size, limits.max_running)
        self._roster = Roster(policy)
        self._times = RingTimes(limits.profiles, (), limits.row_bytes)
        self._roster.set_times(self._times)
        self._ledger = Ledger()
        self._speculation = Speculation(limits, source)
        self._swapping = Swapping(limits, self._roster, self._cache)
        self._batcher = Batcher(
            limits, self._roster, self._cache, self._ledger, self._speculation, self._swapping
        )
        self._admission = Admission(limits)
        self._waits = Waits(limits, self._roster)
        self._story = Story()
        self._stats = HeadStats(
            self._roster,
            self._cache,
            self._ledger,
            self._batcher,
            self._speculation,
            self._swapping,
        )
        self._counts = self._stats.counts

    # --- from daemons --------------------------------------------------------------------------

    def submit(self, request: HeadRequest, now: float) -> list[Emission]:
        """Take a request into the queue; returns what is to be told of one that made place for it.

        A full queue has a place for an owner who holds fewer than another; see
        :meth:`Admission.displaced_by`.

        Raises:
            RequestError: a field is out of range, or the owner's key is in use.
            ContextTooLong: it can never fit into the context, or into the KV blocks.
            Overloaded: the queue is full, and this client has its share of it; or its turn would
                come later than it can wait for. Carries ``retry_after``.
        """
        if self._roster.find(request.owner, request.key) is not None:
            raise RequestError(f"a request {request.key!r} of this daemon is already being served")
        self._admission.check(request)
        self._waits.observe(now)
        job = self._new_job(request, now)
        self._check_wait(job)
        emissions = self._make_place(request, now)
        self._roster.enqueue(job, now)
        self._swapping.arrived(job, now)
        self._counts["requests"] += 1
        self._story.add(now, "submit", request.owner, request.key, len(request.tokens))
        return emissions

    def expire(self, now: float) -> list[Emission]:
        """Refuse those that have waited to be admitted for as long as they may; to be called often.

        That is for ``max_queue_s`` seconds, or until no token can come before the deadline. Who was
        admitted once and gave way goes on waiting.
        """
        self._waits.observe(now)
        late = [job for job in self._roster.queued if self._admission.is_late(job, now)]
        turns: dict[tuple[str, str], float | None] = {}
        emissions = []
        for job in late:
            self._counts["expired"] += 1
            self._remove(job, "expired", now)
            client = job.request.whose
            if client not in turns:
                turns[client] = self._waits.turn_of(self._new_job(job.request, now))
            error = self._admission.waited_in_vain(job, turns[client], now)
            emissions.append(self._overloaded(job, error))
        return emissions

    def cancel(self, owner: str, key: str, now: float) -> None:
        """Stop a request; one that is over already is no error."""
        job = self._roster.find(owner, key)
        if job is not None:
            self._cancel(job, now)

    def cancel_owner(self, owner: str, now: float) -> None:
        """Stop all requests of a daemon that has gone."""
        for job in self._roster.owned_by(owner):
            self._cancel(job, now)

    def credit(self, owner: str, key: str, position: int) -> None:
        """The client has taken all tokens below ``position``; the latest such word counts."""
        job = self._roster.find(owner, key)
        if job is not None:
            job.credited = max(job.credited, min(position, len(job.tokens)))

    # --- to and from the stages ----------------------------------------------------------------

    def next(self, now: float, *, prefill: bool = True) -> Batch | None:
        """The next micro-batch for stage 0: at most one decode and one prefill volume.

        Releases of requests that were cancelled or have ended since the last call are always in it,
        however many volumes are in flight. Without ``prefill`` there is no such volume in it:
        stage 0 has one of which it has run a part.
        """
        batch = self._batcher.compose(now, prefill=prefill)
        self._waits.observe(now)
        if batch is None:
            return None
        for control in batch.control:
            self._story.add(now, "issue", control.body)
            if isinstance(control.body, Admit):
                self._admitted(control.body.request, now)
        for volume in batch.volumes:
            header = volume.header
            self._story.add(now, "issue", header.tick, header.prefill, len(header.rows))
        self._counts["volumes"] += len(batch.volumes)
        self._counts["iterations"] += bool(batch.volumes)
        return batch

    def sampled(self, message: Sampled, tops: Tops, now: float) -> list[Emission]:
        """A volume has gone round; returns what its requests' daemons are to be told.

        A request that is neither in ``choices`` nor in ``failed`` although its rows were to be
        sampled counts as failed: nothing waits for a token that will not come. So does one with
        tokens for which there were no rows.
        """
        rows_back, seconds = self._back(message.tick, now)
        choices: dict[int, list[Choice]] = {}
        for choice in message.choices:
            choices.setdefault(choice.request, []).append(choice)
        failed = set(message.failed)
        forced = {each.request: each.tokens for each in message.forced}
        emissions = []
        for rows in rows_back:
            job = self._roster.of_id(rows.request)
            if job is None:
                continue
            was_awaited = self._came_back(job, rows, message.tick)
            if was_awaited:
                self._roster.ran(job, seconds, now)
            if rows.source >= 0:
                self._cache.copied(job)
            found = choices.get(rows.request, [])
            if rows.request in failed:
                emissions.append(self._fail(job, _NO_TOKEN, now))
            elif rows.sample and was_awaited:
                emissions += self._take_all(job, rows, found, tops, now)
                if rows.request in forced and job.state != "gone":
                    self._speculation.offered(job, forced[rows.request])
            elif found:
                emissions.append(self._fail(job, "the last stage went on from wrong drafts", now))
        self._waits.observe(now)
        return emissions

    def tombstone(self, tick: int, now: float) -> list[Emission]:
        """A volume has gone round with all of its rows dropped.

        Its requests should be over; one that is not has been dropped by mistake and has failed.
        """
        emissions = []
        rows_back, _ = self._back(tick, now)
        for rows in rows_back:
            job = self._roster.of_id(rows.request)
            if job is not None:
                emissions.append(self._fail(job, "a stage dropped rows of this request", now))
        return emissions

    def released(self, tick: int, now: float) -> None:
        """A release has gone round: its blocks can be used again."""
        if not self._ledger.went_round(tick):
            self._stray("release", tick, now)
            return
        freed = self._cache.blocks.reclaim(tick)
        self._story.add(now, "released", tick, freed)

    def set_times(self, times: RingTimes) -> None:
        """What stages have measured of themselves and of their links to the next.

        Of those of which nothing was known before only their links count.
        """
        self._times = times
        self._batcher.set_times(times)

    def draft_order(self) -> DraftOrder | None:
        """What the draft model is to do now, if anything; to be asked after :meth:`next`."""
        return self._speculation.asking.take()

    def guessed(self, found: Guesses) -> None:
        """The draft model's answer to the oldest order that it hasn't answered."""
        self._speculation.asking.answered(found)

    def set_host_room(self, blocks: int, block_s: float) -> None:
        """Every stage has host memory for so many KV blocks, of which each takes so long one way.

        The first word counts.
        """
        self._swapping.open(blocks, block_s)

    # --- reports -------------------------------------------------------------------------------

    @property
    def live(self) -> list[tuple[str, str]]:
        """Owner and key of every request, to be told when the epoch ends."""
        return [(job.request.owner, job.request.key) for job in self._roster]

    @property
    def strays(self) -> int:
        """How many messages there were about ticks not in flight: stages that misbehave."""
        return int(self._counts["strays"])

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters of this epoch and gauges, by name; see :class:`HeadStats`."""
        return self._stats.counters(), self._stats.gauges()

    def load(self, pipeline: str, now: float) -> HeadLoad:
        """What others are told of it, under the name of its pipeline."""
        return self._stats.load(pipeline, now)

    def cache_report(self, version: int) -> CacheReport:
        """What those who route are told: what has changed in the cache since ``version``.

        That is of an earlier report of this epoch; -1: there was none.
        """
        log, limits = self._cache.span_log, self.limits
        whole, added, evicted = log.since(version)
        room = limits.blocks * limits.block_size
        return CacheReport(log.version, whole, added, evicted, room, Costs.of(self._times))

    def validate(self) -> None:
        """Check all invariants.

        Raises:
            InvariantError: one is broken; carries the last transitions.
        """
        try:
            audit(self.limits, self._roster, self._cache, self._ledger)
            self._swapping.validate()
        except InvariantError as error:
            raise InvariantError(str(error), self._story.lines()) from error

    # --- inside --------------------------------------------------------------------------------

    def _make_place(self, request: HeadRequest, now: float) -> list[Emission]:
        waiting, running = self._roster.waiting, self._roster.admitted
        if not self._admission.is_full(waiting, running):
            return []
        error = self._admission.overloaded(waiting, running, self._waits.next_place())
        job = self._admission.displaced_by(request, self._roster.queued, now)
        if job is None:
            self._counts["refused"] += 1
            raise error
        self._counts["displaced"] += 1
        self._story.add(now, "displace", job.request.owner, job.request.key, job.admissions)
        self._roster.remove(job, now)
        self._forget(job)
        return [self._overloaded(job, error)]

    def _new_job(self, request: HeadRequest, now: float) -> Job:
        """A job that is not in the queue yet."""
        job = Job.of(request, now)
        costs = Costs.of(self._times) if request.deadline_s else None
        job.expect(self._cache.find(job).tokens, costs)
        return job

    def _check_wait(self, job: Job) -> None:
        if not self._admission.is_bounded(job.request):
            return
        try:
            self._admission.check_wait(job, self._waits.turn_of(job))
        except MolinkError:
            self._counts["late"] += 1
            raise

    def _overloaded(self, job: Job, error: Overloaded) -> Emission:
        request = job.request
        rejected = Rejected(self.epoch, request.key, "overloaded", str(error), error.retry_after)
        return Emission(request.owner, rejected)

    def _admitted(self, request_id: int, now: float) -> None:
        job = self._roster.of_id(request_id)
        if job is not None and job.admissions == 1:
            self._counts["admitted"] += 1
            self._counts["queue_seconds"] += now - job.since

    def _back(self, tick: int, now: float) -> tuple[tuple[Rows, ...], float]:
        """The rows of a volume that has gone round, and the seconds that it took."""
        returned = self._ledger.returned(tick)
        if returned is None:
            self._stray("volume", tick, now)
            return (), 0.0
        rows, issued_at = returned
        self._story.add(now, "back", tick, len(rows))
        return rows, now - issued_at

    def _came_back(self, job: Job, rows: Rows, tick: int) -> bool:
        """Whether tokens may come with these rows."""
        self._speculation.drafted += len(rows.drafts)
        del job.flight[tick]
        if tick not in job.awaited:
            return False
        job.awaited.remove(tick)
        return True

    def _take_all(
        self, job: Job, rows: Rows, choices: Sequence[Choice], tops: Tops, now: float
    ) -> list[Emission]:
        """The tokens of a live request, up to its end."""
        if not are_due(choices, len(job.tokens), rows.checked):
            return [self._fail(job, "the last stage did not sample its token", now)]
        compared, right = compare(job, choices)
        if compared:
            self._speculation.verified(job, compared, right)
        emissions = []
        for choice in choices:
            emissions.append(self._take(job, choice, tops, now))
            if job.state == "gone":
                return emissions
        go_on(job, len(choices), right)
        if not job.awaited:
            self._roster.came_back(job)
            if job.stalled:
                job.stalled_at = now
        return emissions

    def _take(self, job: Job, choice: Choice, tops: Tops, now: float) -> Emission:
        """A token of a live request: keep it and pass it on."""
        self._counts["tokens"] += 1
        if not job.offered:
            self._cache.offer(job)
        job.issued = len(job.tokens)  # the one before was a row, if only as a draft
        job.tokens.append(choice.token)
        self._roster.sampled(job)
        if job.generated == 1:
            job.first_at = now
        finish = self._finish(job)
        if finish is not None:
            self._counts["finished"] += 1
            self._waits.ended(job)
            self._roster.answered(job)
            self._remove(job, finish, now)
        top = tops.get((choice.request, choice.position))
        pairs = tuple(zip(top.tokens, top.logprobs, strict=False)) if top is not None else ()
        request = job.request
        token = Token(
            self.epoch,
            request.key,
            choice.position,
            choice.token,
            choice.logprob,
            pairs,
            finish,
            job.cached if job.generated == 1 else 0,
        )
        return Emission(request.owner, token)

    def _finish(self, job: Job) -> FinishReason | None:
        if job.tokens[-1] in job.request.stop_ids:
            return "stop"
        spent = job.generated >= job.request.max_tokens
        return "length" if spent or len(job.tokens) >= self.limits.max_context else None

    def _cancel(self, job: Job, now: float) -> None:
        self._counts["cancelled"] += 1
        trip = self._ledger.cancelled() if job.state != "waiting" else None
        self._story.add(now, "cancel", job.request.owner, job.request.key, job.state, job.id)
        self._roster.remove(job, now, trip)
        self._forget(job)
        self._waits.observe(now)

    def _fail(self, job: Job, reason: str, now: float) -> Emission:
        self._counts["failed"] += 1
        job.sound = False
        self._remove(job, "failed", now)
        request = job.request
        return Emission(request.owner, Rejected(self.epoch, request.key, "failed", reason))

    def _remove(self, job: Job, why: str, now: float) -> None:
        self._story.add(now, why, job.request.owner, job.request.key, job.id, len(job.tokens))
        self._roster.remove(job, now)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        self._swapping.forget(job)
        self._speculation.asking.over(job)

    def _stray(self, kind: str, tick: int, now: float) -> None:
        self._counts["strays"] += 1
        self._story.add(now, "stray", kind, tick)
