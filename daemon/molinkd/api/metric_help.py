"""Descriptions and units of the Prometheus metrics of a daemon and its workers."""

from molink.scheduler.policies.mlfq import LEVELS

#: The description of a metric that is missing here, which must not happen.
UNDESCRIBED = "Not described."

_DAEMON = {
    "workers": "Worker processes of this PC; each holds one stage.",
    "standby_workers": "Standby worker processes that are ready (imported and compiled).",
    "daemon_bytes_fetched": "Bytes of model files that this PC fetched from other PCs.",
    "daemon_requests_active": "Active requests of this PC's endpoint.",
    "daemon_requests_started": "Requests that this PC's endpoint accepted.",
    "daemon_requests_submitted": (
        "Submissions to a pipeline's scheduler; a recovery submits requests again."
    ),
    "daemon_requests_cancelled": "Requests whose client disconnected before the end.",
    "daemon_requests_failed": "Requests that ended with an error.",
    "daemon_requests_rejected_overloaded": "Submissions rejected by a scheduler: queue full.",
    "daemon_requests_rejected_too_long": "Submissions rejected by a scheduler: too long.",
    "daemon_requests_rejected_epoch": "Submissions lost to a new epoch; they are submitted again.",
    "daemon_requests_rejected_failed": "Submissions that failed in a stage.",
    "daemon_requests_rejected_invalid": "Submissions rejected by a scheduler: invalid field.",
    "daemon_routes_exploited": "Requests routed to a pipeline that has most of the prompt cached.",
    "daemon_routes_explored": "Requests routed to the pipeline with the lowest estimated cost.",
    "daemon_routes_redirected": (
        "Requests routed away from the pipeline that has the prefix: overloaded."
    ),
    "daemon_routes_lost": (
        "1 after the router failed; requests then go to the least loaded pipeline."
    ),
    "daemon_routes_replicated": (
        "Requests routed to a further pipeline, because requests of a prefix wait ever longer."
    ),
    "control_strangers_refused": "Handshakes on the control port with unknown keys.",
    "control_messages_malformed": "Malformed messages on the control port.",
    "control_messages_forbidden": "Messages on the control port that the sender may not send.",
    "control_members_blocked": "Peers blocked on the control port for misbehaviour.",
    "recoveries": "Completed interruptions of the pipeline, as seen by this PC.",
    "recovery_noticed_timestamp_seconds": (
        "Start of the latest interruption, in seconds since 1970; 0 if there was none."
    ),
}

#: The end of each recovery phase; see ``molink.swarm.agent.recovery``.
_PHASES = {
    "decided": "until this PC had a new assignment or a ring for its stage",
    "files": "until the files of its stage were local and its memory was planned",
    "process": "until its worker had started and read the model's metadata",
    "weights": "until its weights were loaded",
    "profile": "until its steps were profiled",
    "others": "until all other stages were loaded",
    "formed": "until the ring was formed",
    "replayed": "until every waiting stream had its next token",
}

_SCHEDULER = {
    "scheduler_requests": "Requests that this scheduler queued.",
    "scheduler_admitted": "Requests admitted from the queue.",
    "scheduler_queue_seconds": "Total queueing time of admitted requests, in seconds.",
    "scheduler_tokens": "Tokens sampled for this scheduler's requests.",
    "scheduler_finished": "Requests that finished or reached a limit.",
    "scheduler_cancelled": "Requests cancelled by their client or its daemon.",
    "scheduler_displaced": "Waiting requests displaced from a full queue by another client.",
    "scheduler_refused": "Requests rejected: queue full.",
    "scheduler_late": (
        "Requests rejected at once because `max_queue_time` or `timeout` could not be met."
    ),
    "scheduler_expired": "Requests rejected after waiting for their maximum time.",
    "scheduler_failed": "Requests that failed in a stage.",
    "scheduler_volumes": "Volumes issued: the decode or prefill rows of a micro-batch.",
    "scheduler_iterations": "Scheduling iterations that issued something.",
    "scheduler_prompt_tokens": "Prompt tokens of admitted requests.",
    "scheduler_prefill_rows": "Prompt rows issued to the stages; cached tokens have none.",
    "scheduler_preemptions": (
        "Preemptions: a running request gave up its KV blocks and was queued again."
    ),
    "scheduler_swaps_out": "Swaps of a request's KV to host memory at every stage.",
    "scheduler_swaps_in": "Swaps of a request's KV back from host memory.",
    "scheduler_swap_fallbacks": "Preemptions that recomputed because host memory was full.",
    "scheduler_draft_tokens": "Draft tokens sent for verification.",
    "scheduler_draft_tokens_accepted": "Draft tokens that verification confirmed.",
    "scheduler_draft_model_tokens": "Tokens proposed by the draft model.",
    "scheduler_draft_model_seconds": "Seconds spent in the draft model.",
    "scheduler_prefix_hit_tokens": "Tokens of new requests found in the prefix cache.",
    "scheduler_prefix_lookup_tokens": "Tokens of new requests looked up in the prefix cache.",
    "scheduler_prefix_evictions": "KV blocks evicted from the prefix cache.",
    "scheduler_strays": "Messages of stages for unknown sequence numbers: misbehaving stages.",
    "scheduler_blocks": "KV blocks of each stage of the pipeline.",
    "scheduler_blocks_used": "KV blocks held by requests and by pending releases.",
    "scheduler_blocks_releasing": "KV blocks whose release has not completed its round trip.",
    "scheduler_blocks_free": "KV blocks that are empty.",
    "scheduler_blocks_cached": "KV blocks held only by the prefix cache; free on demand.",
    "scheduler_prefix_hit_rate": "Prefix cache hit rate by tokens, 0 to 1.",
    "scheduler_micro_batches": "K: the limit of micro-batches with decode rows in flight.",
    "scheduler_running": "Requests that hold KV blocks.",
    "scheduler_waiting": "Requests in the queue.",
    "scheduler_swapped": "Queued requests whose KV is in host memory.",
    "scheduler_swapped_resume_seconds": (
        "Estimated seconds until the first swapped request resumes (ENST)."
    ),
    "scheduler_host_blocks": "KV blocks that fit in each stage's host memory.",
    "scheduler_host_blocks_used": "KV blocks in host memory.",
    "scheduler_clients": "Clients (API keys of all PCs) with requests here.",
    "scheduler_decode_in_flight": "Decode volumes issued and not yet completed.",
    "scheduler_prefill_in_flight": "Prefill volumes issued and not yet completed.",
    "scheduler_prefill_rows_in_flight": "Rows of prefill volumes issued and not yet completed.",
    "scheduler_cancel_iterations_last": (
        "Iterations from the latest cancel of a running request until its blocks were free."
    ),
    "scheduler_cancel_iterations_max": "The most iterations that a cancel took in this epoch.",
}

_STAGE = {
    "stage_host_expert_bytes": "Bytes of routed experts in host memory, computed by the CPU.",
    "stage_resident_expert_share": "Share of recently chosen experts that were on the device; 0 "
    "if none are in host memory.",
    "stage_host_kv_bytes": "Bytes of host memory reserved for the stage's KV.",
    "stage_steps": "Forward passes of the stage.",
    "stage_rows": "Rows computed by the stage; one per token.",
    "stage_compute_seconds": "Seconds in which the stage computed.",
    "stage_bubble_seconds": "Seconds in which the stage had requests but did not compute.",
    "stage_failed_steps": "Forward passes that failed; their requests are reported as failed.",
    "stage_strays": "Messages that are invalid at this position of the ring.",
    "stage_dropped_slices": "Rows of finished requests, dropped on arrival.",
    "stage_refused": "Invalid volumes and control messages, rejected by the stage.",
    "stage_requests": "Requests known to the stage.",
    "stage_bubble_share": "Bubble share of the time with requests, over the last 5 s; 0 to 1.",
    "stage_busy_share": "Share of the last 5 s in which the stage computed, 0 to 1.",
    "stage_queued_volumes": "Volumes received and not yet computed.",
    "stage_completed_seq": "The sequence number up to which the stage has completed all work.",
    "stage_decode_slowdown": (
        "Duration of the stage's decode steps relative to its profile; 0 = unknown."
    ),
    "stage_weight_bytes": "Bytes of the stage's weights in device memory.",
    "stage_kv_bytes": "Bytes of the stage's KV pool and recurrent states in device memory.",
    "loop_busy_share": (
        "CPU share of the worker's event loop, 0 to 1; above 0.1 it slows the steps."
    ),
    "strangers_refused": "Handshakes on the stage's port with unknown keys.",
    "malformed_messages": "Malformed messages on the stage's port.",
    "members_blocked": "Peers blocked on the stage's port for misbehaviour.",
}

_LINK = {
    "link_sent_frames": "Messages sent to the next stage, including repeats.",
    "link_sent_bytes": "Bytes of these messages; headers are estimated.",
    "link_plain_bytes": "Bytes of rows before compression.",
    "link_packed_bytes": "Bytes of rows as sent; fewer where compression helps.",
    "link_resent_frames": "Messages sent again after a connection was lost.",
    "link_connects": "Connections opened to the next stage; two per channel at the start.",
    "link_rtt_seconds": "Smoothed round-trip time to the next stage; 0 = unknown.",
    "link_latency_seconds": "One-way latency: half the lowest recent round-trip time; 0 = unknown.",
    "link_rate_bytes_per_second": "Measured bandwidth of the link; 0 = unknown.",
    "link_queued_decode_bytes": "Bytes queued for the decode channel.",
    "link_queued_bulk_bytes": "Bytes queued for the bulk channel (prefill rows).",
    "link_unacknowledged_decode_bytes": "Unacknowledged bytes on the decode channel.",
    "link_unacknowledged_bulk_bytes": "Unacknowledged bytes on the bulk channel.",
    "link_received_frames": "Messages received from the previous stage, each once and in order.",
    "link_received_bytes": "Bytes of payload received from the previous stage.",
    "link_received_duplicates": "Duplicate messages after a lost connection.",
    "link_received_gaps": "Messages received out of order; the missing ones are sent again.",
    "link_received_old_epochs": "Messages of another epoch, dropped.",
    "link_received_garbage": "Messages whose rows could not be unpacked or assembled.",
    "link_received_strangers": "Attempts of other peers to act as the previous stage.",
    "link_received_unbound": "Messages on connections that are not a channel of the link, dropped.",
    "link_unfinished_volumes": "Volumes received in part.",
    "link_unfinished_bytes": "Bytes held for volumes received in part.",
}


def _recovery_help() -> dict[str, str]:
    found = {}
    for phase, end in _PHASES.items():
        what = f"phase {phase}: {end}."
        found[f"recovery_last_{phase}_seconds"] = f"Seconds of the latest interruption, {what}"
        found[f"recovery_{phase}_seconds"] = f"Seconds of all interruptions, {what}"
    return found


def _queue_help() -> dict[str, str]:
    """Queue lengths of policies with a multi-level feedback queue."""
    first = {"scheduler_queue_1": "Requests in the first queue, promoted ones included."}
    return first | {
        f"scheduler_queue_{level}": f"Requests in queue {level} of the multi-level feedback queue."
        for level in range(2, LEVELS + 1)
    }


#: Keyed by name without ``molink_`` and ``_total``.
HELP: dict[str, str] = {
    **_DAEMON,
    **_recovery_help(),
    **_SCHEDULER,
    **_queue_help(),
    **_STAGE,
    **_LINK,
}


def describe_metric(name: str) -> str:
    """Return the description of a metric."""
    return HELP.get(name.removeprefix("molink_").removesuffix("_total"), UNDESCRIBED)
