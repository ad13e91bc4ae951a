"""Iteration-level scheduling: what goes into the next micro-batch."""

import math
from collections.abc import Sequence
from itertools import islice

from molink.facts.ringtimes import RingTimes
from molink.scheduler.batch import Batch, HeadVolume, VolumeBuilder
from molink.scheduler.cache import BlockCache
from molink.scheduler.chunk import ChunkSize
from molink.scheduler.controls import ControlIssuer
from molink.scheduler.host import HostCopy
from molink.scheduler.job import Job
from molink.scheduler.ledger import Ledger
from molink.scheduler.limits import HeadLimits
from molink.scheduler.microbatches import MicroBatches
from molink.scheduler.prefix import Match
from molink.scheduler.roster import Roster
from molink.scheduler.speculation.costs import RingLoad
from molink.scheduler.speculation.speculation import Speculation
from molink.scheduler.swapping import Swapping


class Batcher:
    """Composes micro-batches out of a roster, blocks and ticks.

    Decode rows: jobs whose token has come back, spread over the ``K`` micro-batches. Prefill rows:
    chunks of admitted jobs, and of waiting ones as far as slots and blocks allow. Whose turn it is
    among them, and who is preempted, the roster's policy decides.
    A job gets the blocks of its known tokens when it is admitted, as many of them as can be from
    the prefix cache, and grows one by one from then on.
    A decode row that gets no block preempts other jobs; while one is *starved* nobody is admitted,
    and nobody who would give way to it goes on prefilling. Drafts preempt nobody.
    What becomes of the KV of who is preempted, ``swapping`` decides.
    """

    def __init__(
        self,
        limits: HeadLimits,
        roster: Roster,
        cache: BlockCache,
        ledger: Ledger,
        speculation: Speculation,
        swapping: Swapping,
    ) -> None:
        self._limits = limits
        self._speculation = speculation
        self._roster = roster
        self._cache = cache
        self._ledger = ledger
        self._swapping = swapping
        self._controls = ControlIssuer(cache, ledger)
        #: How many micro-batches are in flight.
        self.micro_batches = MicroBatches(
            limits.micro_batches,
            limits.stages,
            limits.profiles,
            limits.row_bytes,
            may_unpair=limits.unpaired,
        )
        self._chunk = ChunkSize(limits.chunk_tokens, limits.profiles, self.micro_batches.count)
        #: Prefill volumes in flight that went without decode rows.
        self._alone: set[int] = set()
        #: Jobs admitted for the micro-batch that is being composed, and what they come back from.
        self._admitted: list[tuple[Job, HostCopy | None]] = []
        #: Jobs that lacked a block when decode rows were last composed.
        self._starved: list[Job] = []
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prefill_rows = 0

    def set_times(self, times: RingTimes) -> None:
        """Stages have measured themselves, or their links, anew."""
        self.micro_batches.set_times(times)
        self._chunk.set_profiles(times.profiles)
        self._speculation.set_times(times)
        self._roster.set_times(times)
        self._swapping.set_times(times)

    def compose(self, now: float, *, prefill: bool = True) -> Batch | None:
        """The next micro-batch, or ``None`` if there is nothing to send."""
        decode, chunk = VolumeBuilder(prefill=False), VolumeBuilder(prefill=True)
        self._admitted = []
        self._roster.ask_anew()
        if not self._ledger.wide:
            if prefill:
                self._make_place(now)
            for job in self._swapping.giving_way(now):
                self._preempt(job)
            running = self._roster.decoding(now)
            streams = len(running)
            context = sum(len(job.tokens) for job in running) // max(1, streams)
            count = self.micro_batches.update(streams, context)
            self._chunk.set_micro_batches(count)
            if self._ledger.volumes(prefill=False) < count:
                self._consult(running, streams, context)
                self._add_decode(decode, running, now)
                self._add_drafts(decode, streams, context)
            if prefill:
                rows = self._prefill_rows(streams, context, now, beside=len(decode) > 0)
                self._add_prefill(chunk, rows, now)
            back = self._bring_back(now)
            if not self._swapping.returns_early and self._ledger.volumes(prefill=False) < count:
                for job in back:
                    if job.state == "decode" and decode.room >= 1:
                        self._add_rows(decode, job, 1, now)
            if not len(decode) and not len(chunk):
                self._add_ahead(decode, streams, context)
        control = [
            each
            for leaving in self._roster.take_leaving()
            for each in self._controls.release(leaving)
        ]
        for job, copy in self._admitted:
            control += self._controls.admission(job, copy)
            self._swapping.forget(job)
        volumes = tuple(self._issue(each, now) for each in (decode, chunk) if len(each))
        if len(chunk) and not len(decode):
            self._alone.add(self._ledger.last)
        return Batch(tuple(control), volumes) if control or volumes else None

    def _issue(self, builder: VolumeBuilder, now: float) -> HeadVolume:
        volume = builder.build(self._ledger.issue())
        self._ledger.sent(volume.header, now)
        return volume

    # --- decode --------------------------------------------------------------------------------

    def _quota(self, streams: int) -> int:
        """Decode rows of a volume, where so many streams are spread over all."""
        return max(1, math.ceil(streams / self.micro_batches.count))

    def _consult(self, running: Sequence[Job], streams: int, context: int) -> None:
        """Ask the draft model of those that may be in the next volume; some wait for it."""
        asking = self._speculation.asking
        if asking.is_on:
            ready = (
                job
                for job in running
                if job.state == "decode" and not job.awaited and not asking.waits(job)
            )
            jobs = list(islice(ready, self._quota(streams)))
            self._speculation.consult(jobs, self._load(len(jobs), streams, context))

    def _add_decode(self, builder: VolumeBuilder, running: Sequence[Job], now: float) -> None:
        quota, asking = self._quota(len(running)), self._speculation.asking
        self._starved = []
        for job in running:
            if len(builder) == quota or builder.room < 1:
                return
            if job.awaited or job.state != "decode":  # or it was preempted for one before it
                continue
            if asking.waits(job):
                continue
            grown = self._grow(job)
            if grown is None:
                self._starved.append(job)
                self._make_room(job, now)
            else:
                self._add_rows(builder, job, 1, now)

    def _add_drafts(self, builder: VolumeBuilder, streams: int, context: int) -> None:
        """Let drafts follow the decode rows, as far as there are blocks for them."""
        load, flying = self._load(len(builder), streams, context), self._ledger.decode_rows
        for job, drafts in self._speculation.drafts(builder.jobs, load, builder.draft_room, flying):
            drafts, blocks = self._housed(job, drafts)
            if drafts:
                released = self._cache.blocks.released_at(blocks)
                builder.add_drafts(job, drafts, blocks, released)

    def _add_ahead(self, builder: VolumeBuilder, streams: int, context: int) -> None:
        """A volume of nothing but drafts, where there is nothing else to do."""
        if self._ledger.ahead >= self._limits.ahead or self._roster.waiting:
            return
        load = self._load(math.ceil(streams / self.micro_batches.count), streams, context)
        if load.prefilling:
            return
        jobs, flying = self._roster.under_way(), self._ledger.decode_rows
        for job, drafts in self._speculation.ahead(jobs, load, flying, builder.draft_room):
            drafts, blocks = self._housed(job, drafts)
            if drafts:
                builder.add_ahead(job, drafts, blocks, self._cache.blocks.released_at(blocks))

    def _load(self, riding: int, streams: int, context: int) -> RingLoad:
        """``riding`` decode rows are in a volume."""
        flying = min(self.micro_batches.count, math.ceil(streams / riding)) if riding else 0
        prefilling = self._ledger.volumes(prefill=True) > 0 or self._roster.has_prompts
        return RingLoad(riding, flying, context, prefilling)

    def _housed(self, job: Job, drafts: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Those of the next ``drafts`` for which there are blocks, and those to be announced."""
        before = len(job.tokens) + len(job.path)
        if self._starved or self._grow(job, len(job.path) + len(drafts)) is None:
            drafts = drafts[: max(0, len(job.blocks) * self._limits.block_size - before)]
        upto = self._limits.blocks_for(before + len(drafts))
        return drafts, job.blocks[job.announced : max(upto, job.announced)]

    def _grow(self, job: Job, drafts: int = 0) -> int | None:
        """See to it that the job's last token, and what may follow it, have blocks.

        How many it got, ``None`` if there are too few.
        """
        lacking = self._limits.blocks_for(len(job.tokens) + drafts) - len(job.blocks)
        if lacking <= 0:
            return 0
        blocks = self._cache.allocate(lacking)
        if blocks is None:
            return None
        job.blocks += blocks
        return lacking

    def _make_room(self, job: Job, now: float) -> None:
        """Preempt until as many blocks as there are starved jobs are on their way back."""
        victims = self._roster.victims(job, now)
        while self._coming < len(self._still_starved()):
            victim = next(victims, None)
            if victim is None or not self._roster.rests(victim):
                return
            self._preempt(victim)

    def _preempt(self, job: Job) -> None:
        self._swapping.keep(job)
        self._roster.preempt(job)
        self.preemptions += 1

    @property
    def _coming(self) -> int:
        """Blocks on their way back."""
        return self._cache.coming(self._roster.leaving).count

    def _still_starved(self) -> list[Job]:
        return [job for job in self._starved if self._roster.of_id(job.id) is job]

    # --- prefill -------------------------------------------------------------------------------

    def _add_prefill(self, builder: VolumeBuilder, left: int, now: float) -> None:
        """Add up to ``left`` prefill rows; a job that waits is admitted when it is its turn."""
        starved = self._still_starved()
        closed, seen = bool(starved), set[Job]()
        while left > 0 and builder.room >= 1:
            prompts = self._roster.prompts(now, closed=closed)
            job = next((job for job in prompts if job not in seen), None)
            if job is None:
                return
            if job.state == "waiting":
                closed = job.copy is not None or not self._admit(job, now)
            if job.state != "waiting":
                seen.add(job)
                if not any(self._roster.gives_way(job, needy, now) for needy in starved):
                    left -= self._add_chunk(builder, job, left, now)

    def _prefill_rows(self, streams: int, context: int, now: float, *, beside: bool) -> int:
        """Rows of the next prefill volume, 0 if there is to be none.

        ``streams`` decode, of ``context`` tokens each on average.

        Of ``K`` micro-batches those that decode take their chunk along (``beside``, SARATHI's
        decode-maximal batches), the others may be a chunk. If chunks went whenever stage 0 is idle,
        a decode volume would meet a stage busy with a chunk, then run alone itself, and pay for
        reading the weights twice. They do where none would: :mod:`molink.scheduler.depth`.
        """
        jobs = self._roster.prompts(now, closed=self._roster.has_prompts)
        if not jobs:
            return 0
        admitted = self._roster.has_prompts
        left = sum(len(job.tokens) - (job.issued if admitted else 0) for job in jobs)
        self._alone = {tick for tick in self._alone if self._ledger.flies(tick)}
        maximum, flying = self.micro_batches.count, self._ledger.volumes(prefill=True)
        apart = self._ledger.volumes(prefill=False) + len(self._alone) < maximum
        paired = flying < maximum and (beside or apart)
        if not paired and not self.micro_batches.may_unpair:
            return 0
        before = jobs[0].issued if admitted else 0
        queued, prompts = self._roster.waiting_tokens, self._roster.waiting
        if admitted:
            queued, prompts = queued + left, prompts + len(jobs)
        rows = self._chunk.rows(streams, left, before, context, queued, prompts)
        if not self._limits.chunk_tokens:
            rows = min(rows, self.micro_batches.rows_ahead or rows)
        if paired:
            return rows
        room = self._ledger.prefill_rows + rows <= self._limits.unpaired_rows
        unpaired = self.micro_batches.unpaired(rows, before, streams, context)
        awaited = self._ledger.awaited_since
        clear = awaited is None or now - awaited <= unpaired.window_s
        return rows if room and clear and flying < unpaired.depth else 0

    def _add_chunk(self, builder: VolumeBuilder, job: Job, maximum: int, now: float) -> int:
        """Add up to ``maximum`` prefill rows of a job; how many it got."""
        in_header = (job.announced + builder.room) * self._limits.block_size - job.issued
        count = min(maximum, len(job.tokens) - job.issued, in_header)
        self._add_rows(builder, job, count, now)
        self.prefill_rows += count
        return count

    def _make_place(self, now: float) -> None:
        """Preempt for those to be admitted next, as far as they lack only that and nothing comes.

        Where prompts of others go before them, they have to wait in any case. This is before jobs
        at rest go into a volume.
        """
        if not self._roster.waiting or self._still_starved():
            return
        first = next(iter(self._roster.prompts(now)), None)
        if first is None or first.state != "waiting":
            return
        limits, running = self._limits, self._roster.admitted
        coming = self._cache.coming(self._roster.leaving)
        if self._roster.places_at_once == 1 and coming.count and running < limits.max_running:
            return
        blocks, found = self._cache.available + coming.count, set[int]()
        for job in self._roster.next_ones(now):
            cached = self._cache.find(job).blocks
            lacks = limits.blocks_for(min(len(job.tokens) + 1, job.kv_end)) - len(cached)
            # What is cached can be allocated, but not to who holds it then.
            lacks += self._cache.blocks.settled_among(set(cached) - found)
            found.update(cached)
            reserved = self._swapping.reserved(now) if job.copy is not None else 0
            giving, victims = list[Job](), self._roster.victims(job, now)
            while running and (
                running >= limits.max_running or lacks + limits.growth(running) + reserved > blocks
            ):
                victim = next(victims, None)
                if victim is None:
                    return
                blocks += coming.add(block for block in victim.blocks if block not in found)
                running -= 1
                giving.append(victim)
            resting = [victim for victim in giving if self._roster.rests(victim)]
            for victim in resting:
                self._preempt(victim)
            if len(resting) < len(giving):  # the rest of the room comes with their rows
                return
            blocks, running = blocks - lacks, running + 1

    def _bring_back(self, now: float) -> list[Job]:
        """Admit jobs that are kept in host memory, as far as it is their turn and there is room."""
        back: list[Job] = []
        while not self._still_starved():
            job = self._roster.first_swapped(now)
            if job is None or not self._admit(job, now):
                break
            back.append(job)
        return back

    def _admit(self, job: Job, now: float) -> bool:
        """Admit a job that waits, if there is room for it."""
        found = self._admissible(job, now)
        if found is None:
            return False
        blocks = self._cache.take(found, self._limits.blocks_for(len(job.tokens)))
        if blocks is None:
            return False
        copy, restored = job.copy, 0
        if copy is not None and copy.tokens > found.tokens:
            restored = len(copy.blocks) - len(found.blocks)
            self._swapping.ins += 1
        self._roster.admit(job, blocks, found, restored)
        self._admitted.append((job, copy if restored else None))
        if job.admissions == 1:
            self.prompt_tokens += job.request.prompt_tokens
            self._cache.count(job)
        return True

    def _admissible(self, job: Job, now: float) -> Match | None:
        """What of the prefix cache the job may use if it is admitted now; ``None`` if it can't be.

        Holding a block only to copy from it must not be what keeps a job out.
        """
        running = self._roster.admitted
        if running >= self._limits.max_running:
            return None
        need = self._limits.blocks_for(min(len(job.tokens) + 1, job.kv_end))
        need += self._limits.growth(running)
        found = self._cache.find(job)
        if job.copy is not None:
            need += self._swapping.reserved(now) if running else 0
            if job.copy.tokens > found.tokens:
                found = self._cache.whole(found)
        if not self._cache.affords(found, need):
            found = self._cache.whole(found)
        return found if self._cache.affords(found, need) else None

    # --- into messages -------------------------------------------------------------------------

    def _add_rows(self, builder: VolumeBuilder, job: Job, count: int, now: float) -> None:
        upto = self._limits.blocks_for(job.issued + count)
        blocks = job.blocks[job.announced : max(upto, job.announced)]
        builder.add(job, count, blocks, self._cache.blocks.released_at(blocks))
        self._roster.issued(job, now)
