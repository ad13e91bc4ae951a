"""Invariants that span the parts of a head."""

from molink.errors import InvariantError
from molink.scheduler.cache import BlockCache
from molink.scheduler.job import Job
from molink.scheduler.ledger import Ledger
from molink.scheduler.limits import HeadLimits
from molink.scheduler.prefix import ROOT
from molink.scheduler.roster import Roster


def audit(limits: HeadLimits, roster: Roster, cache: BlockCache, ledger: Ledger) -> None:
    """Check blocks, rows in flight and emission windows of all jobs.

    Raises:
        InvariantError: something does not agree with the rest.
    """
    ledger.validate()
    roster.validate()
    cache.validate(roster, roster.leaving)
    for job in roster:
        if len(job.tokens) - job.credited > job.request.window:
            raise InvariantError(f"request {job.id} is ahead of its window")
        if job.state == "waiting":
            if job.blocks or job.flight or job.source >= 0 or job.node != ROOT:
                raise InvariantError(f"job {job.request.key} waits with blocks or rows")
        else:
            _audit_admitted(job, limits, ledger)


def _audit_admitted(job: Job, limits: HeadLimits, ledger: Ledger) -> None:
    if len(job.blocks) < limits.blocks_for(job.issued):
        raise InvariantError(f"request {job.id} has rows issued beyond its blocks")
    if job.flight.keys() != ledger.flying(job.id):
        raise InvariantError(f"request {job.id} does not know its rows in flight")
    if job.source >= 0 and job.computed > job.reused:
        raise InvariantError(f"request {job.id} still holds a block that it has copied from")
    if not job.depth * limits.block_size <= max(job.reused, job.computed):
        raise InvariantError(f"request {job.id} shares blocks that are not computed")
