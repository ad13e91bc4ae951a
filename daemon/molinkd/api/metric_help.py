"""What each figure of a daemon and its workers measures, and in what unit; for Prometheus."""

from molink.scheduler.policies.mlfq import LEVELS

#: What is shown of a figure that isn't described here; no such figure may be there.
UNDESCRIBED = "Not described."

_DAEMON = {
    "workers": "Worker processes of this PC, each of which holds one stage.",
    "spare_workers": "1 if a worker process stands by that has imported and compiled all it needs.",
    "daemon_bytes_fetched": "Bytes of model files that this PC has read from other PCs.",
    "daemon_requests_active": "Requests of this PC's endpoint that are not over.",
    "daemon_requests_started": "Requests that this PC's endpoint has taken.",
    "daemon_requests_submitted": (
        "Submissions to the head of a pipeline; a request is submitted again after a recovery."
    ),
    "daemon_requests_cancelled": "Requests whose client went away before their end.",
    "daemon_requests_failed": "Requests that ended with an error.",
    "daemon_requests_rejected_overloaded": "Submissions that a head refused: its queue was full.",
    "daemon_requests_rejected_too_long": "Submissions that a head refused: too long.",
    "daemon_requests_rejected_epoch": "Submissions lost to a new epoch; they are submitted again.",
    "daemon_requests_rejected_failed": "Submissions that failed in a stage.",
    "daemon_requests_rejected_invalid": "Submissions that a head refused: a field was wrong.",
    "daemon_routes_exploited": "Requests sent to a pipeline that has most of the prompt cached.",
    "daemon_routes_explored": "Requests sent to the pipeline where they should cost least.",
    "daemon_routes_redirected": "Requests sent elsewhere: the pipeline that has them is too busy.",
    "daemon_routes_lost": "1 once the router has failed: requests go to who has the fewest.",
    "daemon_routes_replicated": "Requests sent elsewhere: those that begin alike wait ever longer.",
    "control_strangers_refused": "Handshakes on the control port by keys that are no member's.",
    "control_messages_malformed": "Messages on the control port that were none.",
    "control_messages_forbidden": "Messages on the control port that their sender may not send.",
    "control_members_blocked": "Members cut off on the control port because they misbehaved.",
    "recoveries": "Interruptions of the pipeline, as seen from this PC, that are over.",
    "recovery_noticed_timestamp_seconds": (
        "When the latest interruption was noticed, in seconds since 1970; 0 if there was none."
    ),
}

#: What ends each phase of a recovery; see ``molink.swarm.agent.recovery``.
_PHASES = {
    "decided": "until this PC had a new assignment, or a ring for the stage that it has",
    "files": "until the files of its stage were here and its memory was planned",
    "process": "until its worker ran and had read what to load",
    "weights": "until its weights were loaded",
    "profile": "until its steps were measured",
    "others": "until all other stages had loaded",
    "formed": "until the ring was there",
    "replayed": "until every stream that waited had its next token",
}

_SCHEDULER = {
    "head_requests": "Requests that this head has taken into its queue.",
    "head_admitted": "Requests whose turn has come.",
    "head_queue_seconds": "Seconds that these had waited for it, all together.",
    "head_tokens": "Tokens sampled for requests of this head.",
    "head_finished": "Requests that came to their end.",
    "head_cancelled": "Requests that were cancelled, by their client or for their daemon.",
    "head_displaced": "Waiting requests whose place in a full queue another client's request got.",
    "head_refused": "Requests that were refused: the queue was full.",
    "head_late": "Requests refused at once: `max_queue_time` or `timeout` would be over before.",
    "head_expired": "Requests that were refused after waiting for as long as they could.",
    "head_failed": "Requests that a stage could not compute.",
    "head_volumes": "Volumes issued: the decode rows or the prefill rows of a micro-batch.",
    "head_iterations": "Decisions on what stage 0 computes next, that led to something.",
    "head_prompt_tokens": "Tokens of prompts of requests that were admitted.",
    "head_prefill_rows": "Rows of prompts issued to the stages; what the prefix cache had is none.",
    "head_preemptions": "Times that a running request gave up its KV blocks and waited again.",
    "head_swaps_out": "Times that the KV of a request went to host memory at every stage.",
    "head_swaps_in": "Times that it came back from there.",
    "head_swap_fallbacks": "Times that it was given up instead, for want of room there.",
    "head_draft_tokens": "Tokens that were guessed ahead and sent to be verified.",
    "head_draft_tokens_accepted": "Those of them that were right.",
    "head_guessed_tokens": "Tokens that the draft model has guessed.",
    "head_guess_seconds": "Seconds that it took for them.",
    "head_prefix_hit_tokens": "Tokens of new requests whose KV the prefix cache had.",
    "head_prefix_lookup_tokens": "Tokens of new requests that were looked up in the prefix cache.",
    "head_prefix_evictions": "KV blocks that the prefix cache had to forget.",
    "head_strays": "Messages of stages on ticks that are not in flight: stages that misbehave.",
    "head_blocks": "KV blocks that every stage of the pipeline has.",
    "head_blocks_used": "KV blocks of requests, and of releases under way.",
    "head_blocks_releasing": "KV blocks whose release has not gone round the ring yet.",
    "head_blocks_free": "KV blocks that hold nothing.",
    "head_blocks_cached": "KV blocks that only the prefix cache holds: as good as free.",
    "head_prefix_hit_rate": "Share of the tokens looked up that the prefix cache had, 0 to 1.",
    "head_micro_batches": "K: how many micro-batches with decode rows may be in flight.",
    "head_running": "Requests that hold KV blocks.",
    "head_waiting": "Requests in the queue.",
    "head_swapped": "Requests in the queue whose KV is in host memory.",
    "head_swapped_turn_seconds": "Seconds until the first of these should come back (ENST).",
    "head_host_blocks": "KV blocks that every stage has room for in host memory.",
    "head_host_blocks_used": "KV blocks that are there.",
    "head_clients": "Clients (API keys, of all PCs) that have requests here.",
    "head_decode_in_flight": "Decode volumes on their way round the ring.",
    "head_prefill_in_flight": "Prefill volumes on their way round the ring.",
    "head_prefill_rows_in_flight": "Rows of prefill volumes on their way round the ring.",
    "head_cancel_iterations_last": (
        "Iterations from the latest cancel of a running request until its blocks were free again."
    ),
    "head_cancel_iterations_max": "The most iterations that a cancel has taken in this epoch.",
}

_STAGE = {
    "stage_host_kv_bytes": "Bytes of host memory that the stage has for KV.",
    "stage_steps": "Forward passes of the stage.",
    "stage_rows": "Rows that the stage has computed; one per token.",
    "stage_compute_seconds": "Seconds in which the stage computed.",
    "stage_bubble_seconds": "Seconds in which requests lived at the stage and it did not compute.",
    "stage_failed_steps": "Forward passes that failed; their requests are reported as failed.",
    "stage_strays": "Messages that make no sense at this place of the ring.",
    "stage_dropped_slices": "Rows of requests that were over when they came: dropped unseen.",
    "stage_refused": "Volumes and control messages that the stage refused as impossible.",
    "stage_requests": "Requests that the stage knows.",
    "stage_bubble_share": "Bubbles' share of the time with requests, of the last 5 s; 0 to 1.",
    "stage_busy_share": "Share of the last 5 s in which the stage computed, 0 to 1.",
    "stage_queued_volumes": "Volumes that have come and were not computed yet.",
    "stage_completed_seq": "The latest sequence number completed at the stage.",
    "stage_decode_slowdown": (
        "How many times as long as its profile says the stage's decode steps take; 0 = unknown."
    ),
    "stage_weight_bytes": "Bytes of the stage's weights in its device's memory.",
    "stage_kv_bytes": "Bytes of the stage's KV pool in its device's memory.",
    "loop_busy_share": (
        "Share of the time that the worker's event loop took of a CPU, 0 to 1; above 0.1 it slows "
        "the steps."
    ),
    "strangers_refused": "Handshakes on the stage's port by keys that are no member's.",
    "malformed_messages": "Messages on the stage's port that were none.",
    "members_blocked": "Members cut off on the stage's port because they misbehaved.",
}

_LINK = {
    "link_sent_frames": "Messages sent to the next stage, repeated ones included.",
    "link_sent_bytes": "Bytes of these messages; headers are estimated.",
    "link_plain_bytes": "Bytes of rows as the stage made them.",
    "link_packed_bytes": "Bytes of the same rows as they were sent; fewer where packing pays.",
    "link_resent_frames": "Messages sent more than once, after a connection was lost.",
    "link_connects": "Connections made to the next stage; two for each lane's pair at the start.",
    "link_rtt_seconds": "Round trip to the next stage, smoothed; 0 = unknown.",
    "link_latency_seconds": "Half the least round trip of late: one way; 0 = unknown.",
    "link_rate_bytes_per_second": "Measured rate of the link; 0 = unknown.",
    "link_queued_decode_bytes": "Bytes for the decode lane that were not sent yet.",
    "link_queued_bulk_bytes": "Bytes for the bulk lane (prefill rows) that were not sent yet.",
    "link_unacknowledged_decode_bytes": "Bytes on the decode lane that are not acknowledged yet.",
    "link_unacknowledged_bulk_bytes": "Bytes on the bulk lane that are not acknowledged yet.",
    "link_received_frames": "Messages received from the previous stage, each once and in order.",
    "link_received_bytes": "Bytes of payload received from the previous stage.",
    "link_received_duplicates": "Messages that had come before; after a lost connection.",
    "link_received_gaps": "Messages that came too early; those before them are sent again.",
    "link_received_old_epochs": "Messages of another epoch: dropped.",
    "link_received_garbage": "Messages whose rows could not be unpacked or put together.",
    "link_received_strangers": "Wishes to be the previous stage, of others than it.",
    "link_received_unbound": "Messages on connections that are no lane of the link: dropped.",
    "link_unfinished_volumes": "Volumes of which only a part has come.",
    "link_unfinished_bytes": "Bytes kept for volumes of which only a part has come.",
}


def _recovery_help() -> dict[str, str]:
    found = {}
    for phase, end in _PHASES.items():
        what = f"phase {phase}: {end}."
        found[f"recovery_last_{phase}_seconds"] = f"Seconds of the latest interruption, {what}"
        found[f"recovery_{phase}_seconds"] = f"Seconds of all interruptions, {what}"
    return found


def _queue_help() -> dict[str, str]:
    """Of policies with a multi-level feedback queue."""
    first = {"head_queue_1": "Requests in the queue that goes first, those promoted included."}
    return first | {
        f"head_queue_{level}": f"Requests that go after those of {level - 1} better queues."
        for level in range(2, LEVELS + 1)
    }


#: By the name without ``molink_`` and ``_total``.
HELP: dict[str, str] = {
    **_DAEMON,
    **_recovery_help(),
    **_SCHEDULER,
    **_queue_help(),
    **_STAGE,
    **_LINK,
}


def describe_metric(name: str) -> str:
    """What the figure of that name measures."""
    return HELP.get(name.removeprefix("molink_").removesuffix("_total"), UNDESCRIBED)
