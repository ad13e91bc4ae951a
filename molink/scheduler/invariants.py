"""Invariants that span the parts of a head."""

from molink.errors import InvariantError
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.in_flight import InFlightTracker
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.prefix_tree import ROOT
from molink.scheduler.request_queues import RequestQueues
from molink.scheduler.request_state import RequestState


def check_invariants(
    config: SchedulerConfig,
    queues: RequestQueues,
    cache: KVCacheManager,
    in_flight: InFlightTracker,
) -> None:
    """Check blocks, rows in flight and emission windows of all jobs.

    Raises:
        InvariantError: something does not agree with the rest.
    """
    in_flight.validate()
    queues.validate()
    cache.validate(queues, queues.pending_releases)
    for state in queues:
        if len(state.tokens) - state.num_credited > state.request.credit_window:
            raise InvariantError(f"request {state.id} is ahead of its window")
        if state.phase == "waiting":
            if state.blocks or state.in_flight or state.copy_source >= 0 or state.tree_node != ROOT:
                raise InvariantError(f"job {state.request.key} waits with blocks or rows")
        else:
            _check_admitted(state, config, in_flight)


def _check_admitted(
    state: RequestState, config: SchedulerConfig, in_flight: InFlightTracker
) -> None:
    if len(state.blocks) < config.blocks_for(state.num_issued):
        raise InvariantError(f"request {state.id} has rows issued beyond its blocks")
    if state.in_flight.keys() != in_flight.seqs_of_request(state.id):
        raise InvariantError(f"request {state.id} does not know its rows in flight")
    if state.copy_source >= 0 and state.num_computed > state.num_reused:
        raise InvariantError(f"request {state.id} still holds a block that it has copied from")
    if not state.tree_depth * config.block_size <= max(state.num_reused, state.num_computed):
        raise InvariantError(f"request {state.id} shares blocks that are not computed")
