"""Exact decisions of a scheduler, with the test in place of the stages."""

from itertools import count

import pytest

from molink.errors import ContextTooLong, InvariantError, Overloaded, RequestError
from molink.scheduler.batch import MicroBatch
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.create import create_scheduling_policy
from molink.scheduler.request_state import ABANDONED_AFTER_S, Emission, RequestState
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    Grammar,
    History,
    Release,
    RequestSlice,
    SampledId,
    SamplerOutput,
    SamplingParams,
    TopLogprobs,
    Volume,
)
from molink.wire.messages.load import MAX_REQUESTS, RequestLoad
from molink.wire.messages.serving import OutputToken, Rejected
from tests.support.request_states import make_state

PLAIN = SamplingParams()
PENALTY = SamplingParams(presence_penalty=0.5)


def limits(**changes: int) -> SchedulerConfig:
    given = {"num_blocks": 64, "block_size": 4, "micro_batches": 2, "max_num_batched_tokens": 8}
    return SchedulerConfig(**{**given, "prefix_cache": False, **changes})


def is_empty(scheduler: Scheduler) -> bool:
    """Whether the scheduler has no requests and all blocks are free."""
    return not scheduler.live_requests and not scheduler.collect_stats()[1]["scheduler_blocks_used"]


def request(
    key: str,
    tokens: int,
    answer: int = 100,
    peer: str = "peer",
    **changes: SamplingParams | int | tuple[int, ...],
) -> RequestState:
    fields = {"prompt_tokens": tokens, "sampling_params": PLAIN, **changes}
    return make_state(peer, key, tuple(range(tokens)), max_tokens=answer, **fields)


def submit(scheduler: Scheduler, *requests: RequestState) -> None:
    for each in requests:
        scheduler.submit_request(each, 0.0)


def volumes(batch: MicroBatch | None) -> list[Volume]:
    return [] if batch is None else [volume.header for volume in batch.volumes]


def controls(batch: MicroBatch | None) -> list[Admit | History | Release]:
    return [] if batch is None else [control.body for control in batch.controls]


def back(scheduler: Scheduler, volume: Volume, token: int = 50) -> list[Emission]:
    """Return the volume, with ``token`` for each sampled row."""
    choices = tuple(
        SampledId(rows.request, rows.start + rows.count, token)
        for rows in volume.slices
        if rows.sample
    )
    emissions = scheduler.on_sampled(SamplerOutput(volume.seq, choices), {}, 0.0)
    scheduler.validate()
    return emissions


def step(scheduler: Scheduler, token: int = 50) -> list[Emission]:
    """Complete one micro-batch and its releases."""
    batch = scheduler.next_batch(0.0)
    scheduler.validate()
    emissions = []
    for volume in volumes(batch):
        emissions += back(scheduler, volume, token)
    for control in controls(batch):
        if isinstance(control, Release):
            scheduler.on_released(control.seq, 0.0)
    scheduler.validate()
    return emissions


# --- prefill -------------------------------------------------------------------------------------


def test_chunks_of_a_prompt_are_pipelined() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 10))
    first, second = scheduler.next_batch(0.0), scheduler.next_batch(0.0)
    assert controls(first) == [Admit(1, 0, PLAIN, 10, 109)]
    assert volumes(first)[0].slices == (RequestSlice(0, 0, 8, after_seq=1, blocks=(0, 1)),)
    assert first.volumes[0].tokens == list(range(8))
    assert volumes(first)[0].prefill
    assert volumes(second)[0].slices == (
        RequestSlice(0, 8, 2, after_seq=2, blocks=(2,), sample=True),
    )
    assert scheduler.next_batch(0.0) is None


def test_a_chunk_holds_several_prompts_in_order_of_arrival() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 3), request("b", 3), request("c", 5))
    batch = scheduler.next_batch(0.0)
    assert [type(body) for body in controls(batch)] == [Admit, Admit, Admit]
    rows = volumes(batch)[0].slices
    assert [(group.request, group.start, group.count, group.sample) for group in rows] == [
        (0, 0, 3, True),
        (1, 0, 3, True),
        (2, 0, 2, False),
    ]
    assert [group.after_seq for group in rows] == [1, 2, 3]
    assert volumes(batch)[0].seq == 4


def test_at_most_k_prefill_volumes_in_flight() -> None:
    scheduler = Scheduler(limits(micro_batches=2), 1)
    submit(scheduler, request("a", 40))
    sent = [volumes(scheduler.next_batch(0.0))[0] for _ in range(2)]
    assert scheduler.next_batch(0.0) is None
    back(scheduler, sent[0])
    assert len(volumes(scheduler.next_batch(0.0))) == 1


def test_a_resubmitted_request_continues() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=64), 1)
    submit(scheduler, request("a", 9, 2, prompt_tokens=6, sampling_params=PENALTY))
    batch = scheduler.next_batch(0.0)
    assert controls(batch)[0] == Admit(1, 0, PENALTY, 6, 10)
    assert batch.controls[1].ids == tuple(range(9))
    assert volumes(batch)[0].slices == (
        RequestSlice(0, 0, 9, after_seq=2, blocks=(0, 1, 2), sample=True),
    )
    (emission,) = back(scheduler, volumes(batch)[0])
    assert emission.message == OutputToken(1, "a", 9, 50, emission.message.logprob)
    (emission,) = step(scheduler)
    assert (emission.message.position, emission.message.finish_reason) == (10, "length")


def test_history_is_sent_for_penalties_in_fragments() -> None:
    scheduler = Scheduler(limits(num_blocks=1 << 16, max_num_batched_tokens=4096), 1)
    submit(scheduler, request("a", 130_000, sampling_params=PENALTY), request("b", 5))
    batch = scheduler.next_batch(0.0)
    parts = [control for control in batch.controls if isinstance(control.body, History)]
    assert [(part.body.seq, part.body.first, len(part.ids)) for part in parts] == [
        (2, 0, 60_000),
        (3, 60_000, 60_000),
        (4, 120_000, 10_000),
    ]
    assert all(part.body.payload.shape == (len(part.ids),) for part in parts)
    assert volumes(batch)[0].slices[0].after_seq == 4


def test_admission_needs_a_slot() -> None:
    scheduler = Scheduler(limits(max_num_seqs=1), 1)
    submit(scheduler, request("a", 2, 1), request("b", 2, 1))
    assert [body.request for body in controls(scheduler.next_batch(0.0))] == [0]
    assert scheduler.next_batch(0.0) is None


def test_admission_needs_spare_blocks() -> None:
    # 16 blocks of 4 tokens; "a" has 5 with growth of 4 reserved; "b" needs 8.
    scheduler = Scheduler(limits(num_blocks=16, max_num_batched_tokens=64), 1)
    submit(scheduler, request("a", 18, 2), request("b", 31, 2), request("c", 1, 2))
    batch = scheduler.next_batch(0.0)
    assert [body.request for body in controls(batch)] == [0]
    back(scheduler, volumes(batch)[0])
    assert [emission.message.finish_reason for emission in step(scheduler)] == ["length"]
    batch = scheduler.next_batch(0.0)
    assert controls(batch) == [Release(4, 0, after_seq=3), Admit(5, 1, PLAIN, 31, 32)]
    scheduler.on_released(4, 0.0)
    assert [body.request for body in controls(scheduler.next_batch(0.0))] == [2]


# --- decode --------------------------------------------------------------------------------------


def test_decodes_are_spread_over_the_micro_batches() -> None:
    scheduler = Scheduler(limits(micro_batches=2, max_num_batched_tokens=64), 1)
    submit(scheduler, *(request(f"r{i}", 2) for i in range(5)))
    step(scheduler)
    sent = [volumes(scheduler.next_batch(0.0))[0] for _ in range(2)]
    assert [len(volume.slices) for volume in sent] == [3, 2]
    assert not any(volume.prefill for volume in sent)
    assert scheduler.next_batch(0.0) is None
    back(scheduler, sent[1])
    assert [rows.request for rows in volumes(scheduler.next_batch(0.0))[0].slices] == [3, 4]


def test_at_most_k_decode_volumes_in_flight() -> None:
    scheduler = Scheduler(limits(micro_batches=2, max_num_batched_tokens=2), 1)
    submit(scheduler, *(request(f"r{i}", 2) for i in range(3)))
    for _ in range(2):
        batch = scheduler.next_batch(0.0)
        back(scheduler, volumes(batch)[-1])
    assert scheduler.collect_stats()[1]["scheduler_decode_in_flight"] == 1.0
    back(scheduler, volumes(scheduler.next_batch(0.0))[-1])
    scheduler.next_batch(0.0)
    assert scheduler.collect_stats()[1]["scheduler_decode_in_flight"] == 2.0


def test_decode_and_prefill_rows_travel_in_separate_volumes() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 4))
    step(scheduler, token=33)
    submit(scheduler, request("b", 4))
    batch = scheduler.next_batch(0.0)
    decode, prefill = batch.volumes
    # The admission of b takes seq 3, and the volumes follow it.
    assert decode.header.slices == (RequestSlice(0, 4, 1, after_seq=2, blocks=(1,), sample=True),)
    assert decode.tokens == [33]
    assert (decode.header.seq, prefill.header.seq) == (4, 5)
    assert (decode.header.prefill, prefill.header.prefill) == (False, True)
    assert prefill.header.slices == (RequestSlice(1, 0, 4, after_seq=3, blocks=(2,), sample=True),)


def test_tokens_are_emitted_with_alternatives_and_stop() -> None:
    scheduler = Scheduler(limits(), 4)
    submit(scheduler, request("a", 2, stop_token_ids=(9,)))
    volume = volumes(scheduler.next_batch(0.0))[0]
    sampled = SamplerOutput(volume.seq, (SampledId(0, 2, 9, -0.5),))
    tops = {(0, 2): TopLogprobs(0, 2, (9, 8), (-0.5, -1.5))}
    (emission,) = scheduler.on_sampled(sampled, tops, 0.0)
    top = ((9, -0.5), (8, -1.5))
    assert emission == Emission("peer", OutputToken(4, "a", 2, 9, -0.5, top, "stop"))
    assert controls(scheduler.next_batch(0.0)) == [Release(3, 0, after_seq=2)]
    scheduler.on_released(3, 0.0)
    assert is_empty(scheduler)


def test_the_maximum_length_ends_a_request() -> None:
    scheduler = Scheduler(limits(max_model_len=6), 1)
    submit(scheduler, request("a", 4, 2))
    assert [step(scheduler)[0].message.finish_reason for _ in range(2)] == [None, "length"]


def test_uncredited_tokens_pause_a_request() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 2, credit_window=2))
    assert [len(step(scheduler)) for _ in range(4)] == [1, 1, 0, 0]
    scheduler.grant_credit("peer", "a", 3)
    assert [len(step(scheduler)) for _ in range(3)] == [1, 0, 0]
    scheduler.grant_credit("peer", "a", 1)  # an outdated credit changes nothing
    scheduler.grant_credit("peer", "a", 999)  # credit beyond the emitted tokens is ignored
    assert [len(step(scheduler)) for _ in range(3)] == [1, 1, 0]
    scheduler.grant_credit("peer", "unknown", 3)


# --- blocks --------------------------------------------------------------------------------------


def tight(micro_batches: int) -> Scheduler:
    """Requests 0 and 1 decode with 16 tokens and one block each; one block of 16 is free."""
    scheduler = Scheduler(
        limits(num_blocks=3, block_size=16, max_num_batched_tokens=64, micro_batches=micro_batches),
        1,
    )
    submit(scheduler, request("old", 15, 34), request("young", 15, 34))
    step(scheduler)
    assert scheduler.collect_stats()[1]["scheduler_blocks_free"] == 1.0
    return scheduler


def test_blocks_are_reused_after_their_release_completes() -> None:
    scheduler = Scheduler(limits(num_blocks=2, micro_batches=1), 1)
    submit(scheduler, request("a", 5, 1), request("b", 5, 1))
    (emission,) = back(scheduler, volumes(scheduler.next_batch(0.0))[0])
    assert emission.message.finish_reason == "length"
    batch = scheduler.next_batch(0.0)
    assert controls(batch) == [Release(3, 0, after_seq=2)]
    assert volumes(batch) == []
    assert scheduler.next_batch(0.0) is None
    scheduler.on_released(3, 0.0)
    batch = scheduler.next_batch(0.0)
    assert controls(batch) == [Admit(4, 1, PLAIN, 5, 5)]
    assert volumes(batch)[0].slices == (
        RequestSlice(1, 0, 5, after_seq=4, blocks=(0, 1), sample=True),
    )


def test_the_youngest_is_preempted_and_resumes() -> None:
    scheduler = tight(micro_batches=1)
    texts: dict[str, list[int]] = {"old": [], "young": []}
    token = count(100)
    ended = []
    while not is_empty(scheduler):
        batch = scheduler.next_batch(0.0)
        scheduler.validate()
        for volume in volumes(batch):
            for emission in back(scheduler, volume, next(token)):
                message = emission.message
                assert message.position == 16 + len(texts[message.key])
                texts[message.key].append(message.token)
        for body in controls(batch):
            if isinstance(body, Release):
                ended.append((body.request, len(texts["young"])))
                scheduler.on_released(body.seq, 0.0)
    # "young" is starved at its 17th token when "old" needs its block; it returns as 2.
    assert ended == [(1, 1), (0, 1), (2, 33)]
    assert len(texts["old"]) == 33
    assert scheduler.collect_stats()[0]["scheduler_preemptions_total"] == 1.0


def test_a_preempted_request_returns_under_a_new_id_with_its_tokens() -> None:
    scheduler = tight(micro_batches=1)
    submit(scheduler, request("new", 1, 1))
    while not scheduler.collect_stats()[0]["scheduler_preemptions_total"]:
        step(scheduler, token=70)
    scheduler.cancel_request("peer", "old", 0.0)
    step(scheduler)
    batch = scheduler.next_batch(0.0)
    assert [(admit.request, admit.prompt_tokens) for admit in controls(batch)] == [(2, 15)]
    (volume,) = batch.volumes
    assert volume.tokens == [*range(15), 50, 70]
    (rows,) = volume.header.slices
    assert (rows.start, rows.count, rows.sample) == (0, 17, True)
    assert back(scheduler, volume.header)[0].message.position == 17


def test_a_request_never_preempts_an_older_one() -> None:
    scheduler = tight(micro_batches=2)
    first, second = (volumes(scheduler.next_batch(0.0))[0] for _ in range(2))
    back(scheduler, first)
    with_last_block = volumes(scheduler.next_batch(0.0))[0]
    assert [len(rows.blocks) for rows in with_last_block.slices] == [1]
    back(scheduler, second)
    assert scheduler.next_batch(0.0) is None
    back(scheduler, with_last_block)
    # "young" has waited longer and lacks a block; "old" runs.
    batch = scheduler.next_batch(0.0)
    assert controls(batch) == []
    assert [rows.request for rows in volumes(batch)[0].slices] == [0]


def test_rows_in_flight_are_never_preempted() -> None:
    scheduler = tight(micro_batches=2)
    first, second = (volumes(scheduler.next_batch(0.0))[0] for _ in range(2))
    back(scheduler, second)
    with_last_block = volumes(scheduler.next_batch(0.0))[0]
    assert [rows.request for rows in with_last_block.slices] == [1]
    back(scheduler, first)
    # "old" lacks a block, and "young" is in flight.
    assert scheduler.next_batch(0.0) is None
    back(scheduler, with_last_block)
    batch = scheduler.next_batch(0.0)
    assert controls(batch) == [Release(7, 1, after_seq=6)]
    assert volumes(batch) == []
    scheduler.on_released(7, 0.0)
    batch = scheduler.next_batch(0.0)
    # Blocks return with the seq that released them; none is admitted in between.
    assert volumes(batch)[0].slices[0].after_seq == 7
    assert [rows.request for rows in volumes(batch)[0].slices] == [0]


def test_a_starved_request_blocks_admission() -> None:
    scheduler = Scheduler(
        limits(num_blocks=6, block_size=64, max_num_batched_tokens=999, micro_batches=1), 1
    )
    submit(
        scheduler,
        *(request(key, tokens) for key, tokens in zip("abcd", (63, 63, 9, 69), strict=True)),
    )
    step(scheduler)
    step(scheduler)
    batch = scheduler.next_batch(0.0)
    # The last block goes to "a"; "b" lacks one, so "d" is preempted; "c" needs none.
    assert [body.request for body in controls(batch)] == [3]
    assert [rows.request for rows in volumes(batch)[0].slices] == [0, 2]
    scheduler.on_released(controls(batch)[0].seq, 0.0)
    scheduler.cancel_request("peer", "d", 0.0)
    submit(scheduler, request("new", 1))
    assert scheduler.next_batch(0.0) is None
    back(scheduler, volumes(batch)[0])
    batch = scheduler.next_batch(0.0)
    assert [volume.prefill for volume in volumes(batch)] == [False]
    assert [rows.request for rows in volumes(batch)[0].slices] == [1, 0, 2]


def test_a_starved_request_pauses_younger_prefills() -> None:
    scheduler = Scheduler(
        limits(num_blocks=7, block_size=16, max_num_batched_tokens=16, micro_batches=2), 1
    )
    submit(scheduler, request("old", 16, 80))
    step(scheduler)
    submit(scheduler, request("young", 48, 30))
    prefills = [volumes(scheduler.next_batch(0.0)) for _ in range(2)]
    assert [[volume.prefill for volume in sent] for sent in prefills] == [[False, True], [True]]
    decode = prefills[0].pop(0)
    while decode is not None:
        back(scheduler, decode)
        decode = next(iter(volumes(scheduler.next_batch(0.0))), None)
    assert len(scheduler._queues.find_request("peer", "old").tokens) == 65
    back(scheduler, prefills[0][0])
    assert scheduler.next_batch(0.0) is None
    back(scheduler, prefills[1][0])
    assert [body.request for body in controls(scheduler.next_batch(0.0))] == [1]


def test_stalled_requests_are_preempted() -> None:
    scheduler = Scheduler(
        limits(num_blocks=4, block_size=2, max_num_batched_tokens=64, micro_batches=1), 1
    )
    submit(scheduler, request("slow", 5, 3, credit_window=1))
    step(scheduler)
    assert scheduler.next_batch(0.0) is None
    submit(scheduler, request("new", 5, 3))
    assert controls(scheduler.next_batch(0.0)) == [Release(3, 0, after_seq=2)]
    scheduler.on_released(3, 0.0)
    batch = scheduler.next_batch(0.0)
    assert [body.request for body in controls(batch)] == [1]
    assert scheduler._queues.find_request("peer", "slow").phase == "waiting"
    scheduler.grant_credit("peer", "slow", 6)
    scheduler.cancel_request("peer", "new", 0.0)
    back(scheduler, volumes(batch)[0])
    positions = [emission.message.position for _ in range(3) for emission in step(scheduler)]
    assert positions == [6]


# --- the end of a request ------------------------------------------------------------------------


def test_a_cancel_while_waiting_leaves_no_trace() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 4))
    scheduler.cancel_request("peer", "a", 0.0)
    scheduler.cancel_request("peer", "a", 0.0)
    assert scheduler.next_batch(0.0) is None
    assert is_empty(scheduler)


def test_a_cancel_in_flight_releases_at_once_and_ignores_results() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 20))
    sent = [volumes(scheduler.next_batch(0.0))[0] for _ in range(2)]
    scheduler.cancel_request("peer", "a", 0.0)
    assert controls(scheduler.next_batch(0.0)) == [Release(4, 0, after_seq=3, pending_seqs=(2,))]
    assert back(scheduler, sent[0]) == []
    assert scheduler.on_tombstone(sent[1].seq, 0.0) == []
    scheduler.on_released(4, 0.0)
    assert is_empty(scheduler)
    assert scheduler.num_strays == 0
    assert scheduler.collect_stats()[1]["scheduler_cancel_iterations_last"] == 1.0


def test_a_disconnected_peers_requests_are_cancelled() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 4), request("b", 4))
    scheduler.submit_request(make_state("other", "a", (1,), 1, 5, PLAIN), 0.0)
    step(scheduler)
    scheduler.cancel_peer("peer", 0.0)
    assert scheduler.live_requests == [("other", "a")]
    assert [body.request for body in controls(scheduler.next_batch(0.0))[:2]] == [0, 2]


@pytest.mark.parametrize("how", ["failed", "missing", "misplaced", "tombstone"])
def test_failed_rows_end_only_their_request(how: str) -> None:
    scheduler = Scheduler(limits(), 2)
    submit(scheduler, request("a", 2), request("b", 2))
    (volume,) = volumes(scheduler.next_batch(0.0))
    good = SampledId(1, 2, 5)
    sampled = {
        "failed": SamplerOutput(volume.seq, (good,), (0,)),
        "missing": SamplerOutput(volume.seq, (good,)),
        "misplaced": SamplerOutput(volume.seq, (SampledId(0, 7, 5), good)),
    }
    if how == "tombstone":
        emissions = scheduler.on_tombstone(volume.seq, 0.0)
        assert len(emissions) == 2
    else:
        emissions = scheduler.on_sampled(sampled[how], {}, 0.0)
        assert emissions[1].message.position == 2
    rejected = emissions[0].message
    assert isinstance(rejected, Rejected)
    assert (rejected.epoch, rejected.key, rejected.reason) == (2, "a", "failed")
    scheduler.validate()
    assert Release(4, 0, after_seq=3) in controls(scheduler.next_batch(0.0))


def test_messages_about_unknown_seqs_are_counted_and_ignored() -> None:
    scheduler = Scheduler(limits(), 1)
    assert scheduler.on_sampled(SamplerOutput(5), {}, 0.0) == []
    assert scheduler.on_tombstone(6, 0.0) == []
    scheduler.on_released(7, 0.0)
    assert scheduler.collect_stats()[0]["scheduler_strays_total"] == 3.0


# --- admission -----------------------------------------------------------------------------------


def test_a_full_queue_rejects_with_retry_after() -> None:
    scheduler = Scheduler(limits(max_num_seqs=1, max_queue_len=1), 1)
    submit(scheduler, request("a", 2, 1), request("b", 2))
    with pytest.raises(Overloaded, match="0 requests are running and 2 waiting") as caught:
        submit(scheduler, request("c", 2))
    assert caught.value.retry_after == 1.0
    step(scheduler)
    submit(scheduler, request("c", 2))


def test_peers_share_a_full_queue() -> None:
    scheduler = Scheduler(limits(max_num_seqs=1, max_queue_len=5), 1)
    submit(scheduler, *(request(f"a{i}", 2, peer="a") for i in range(6)))
    told = []
    for number in range(3):
        told += scheduler.submit_request(request(f"b{number}", 2, peer="b"), 0.0)
        scheduler.validate()
    assert [(each.peer, each.message.key, each.message.reason) for each in told] == [
        ("a", "a5", "overloaded"),
        ("a", "a4", "overloaded"),
        ("a", "a3", "overloaded"),
    ]
    for peer in "ab":
        with pytest.raises(Overloaded):
            submit(scheduler, request("one more", 2, peer=peer))
    (emission,) = scheduler.submit_request(request("c", 2, peer="c"), 0.0)
    assert emission.message.retry_after >= 1
    assert scheduler.collect_stats()[0]["scheduler_displaced_total"] == 4.0


def test_clients_of_a_peer_share_a_full_queue() -> None:
    scheduler = Scheduler(limits(max_num_seqs=1, max_queue_len=5), 1)
    submit(scheduler, *(request(f"a{i}", 2, client="a", priority=-(i == 5)) for i in range(6)))
    told = []
    for number in range(3):
        told += scheduler.submit_request(request(f"b{number}", 2, client="b"), 0.0)
        scheduler.validate()
    assert [each.message.key for each in told] == ["a4", "a3", "a2"], (
        "the lowest priority, the latest"
    )
    with pytest.raises(Overloaded):
        submit(scheduler, request("b3", 2, client="b"))
    # Another peer gets half, regardless of the number of clients.
    told = [*scheduler.submit_request(request("o0", 2, peer="other"), 0.0)]
    told += scheduler.submit_request(request("o1", 2, peer="other"), 0.0)
    assert [each.peer for each in told] == ["peer", "peer"]


@pytest.mark.parametrize("policy", ["fcfs", "skip-join-mlfq", "gittins"])
def test_slots_go_to_the_least_served_client_by_priority(policy: str) -> None:
    scheduler = Scheduler(
        limits(max_num_seqs=4, max_num_batched_tokens=64), 1, create_scheduling_policy(policy)
    )
    submit(scheduler, *(request(f"a{i}", 2, client="a", priority=-i) for i in range(3)))
    submit(scheduler, *(request(f"b{i}", 2, client="b", priority=i) for i in range(3)))
    scheduler.next_batch(0.0)
    admitted = [state.key for state in scheduler._queues._running.values()]
    assert admitted == ["a2", "b0", "a1", "b1"]


def test_slots_go_to_the_least_served_peer() -> None:
    scheduler = Scheduler(limits(max_num_seqs=3, max_num_batched_tokens=64), 1)
    submit(scheduler, *(request(f"a{i}", 2, peer="a") for i in range(5)))
    submit(scheduler, *(request(f"b{i}", 2, peer="b") for i in range(2)))
    scheduler.next_batch(0.0)
    admitted = [state.key for state in scheduler._queues._running.values()]
    assert admitted == ["a0", "b0", "a1"]


def test_stalled_clients_do_not_block_others() -> None:
    scheduler = Scheduler(
        limits(max_num_seqs=4, max_queue_len=4, num_blocks=64, max_num_batched_tokens=64), 1
    )
    for number in range(8):
        submit(scheduler, request(f"s{number}", 8, peer="greedy", credit_window=1))
    emitted = []
    for _ in range(30):
        emitted += step(scheduler)
    assert scheduler.collect_stats()[1]["scheduler_running"] == 4.0
    (displaced,) = scheduler.submit_request(request("new", 4, 3, peer="other"), 0.0)
    assert displaced.peer == "greedy"
    for _ in range(10):
        emitted += [emission for emission in step(scheduler) if emission.peer == "other"]
    assert emitted[-1].message.finish_reason == "length"


def test_an_abandoned_request_is_displaced_by_its_own_peer() -> None:
    scheduler = Scheduler(
        limits(max_num_seqs=2, max_queue_len=1, max_num_batched_tokens=64, micro_batches=1), 1
    )
    submit(scheduler, request("paused", 4, credit_window=1), request("busy", 4))
    step(scheduler)
    scheduler.submit_request(request("new", 4), ABANDONED_AFTER_S - 1)
    batch = scheduler.next_batch(ABANDONED_AFTER_S - 1)
    assert [volume.prefill for volume in volumes(batch)] == [False]
    back(scheduler, volumes(batch)[0])
    batch = scheduler.next_batch(ABANDONED_AFTER_S)
    assert [type(body) for body in controls(batch)] == [Release, Admit]
    assert controls(batch)[0].request == 0, "released for the waiting request"
    (emission,) = scheduler.submit_request(request("newer", 4), ABANDONED_AFTER_S)
    assert (emission.message.key, emission.message.reason) == ("paused", "overloaded")
    scheduler.validate()


def test_abandonment_counts_from_the_stall() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("slow", 4, credit_window=2))
    state = scheduler._queues.find_request("peer", "slow")
    for position, now in ((4, 100.0), (5, 200.0)):
        (volume,) = volumes(scheduler.next_batch(now))
        scheduler.on_sampled(SamplerOutput(volume.seq, (SampledId(0, position, 50),)), {}, now)
    assert not state.is_abandoned(199.0 + ABANDONED_AFTER_S)
    assert state.is_abandoned(200.0 + ABANDONED_AFTER_S)
    scheduler.grant_credit("peer", "slow", 5)
    assert not state.is_abandoned(300.0)


def test_a_stalled_request_resumes_without_competition() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("paused", 4, 3, credit_window=1))
    step(scheduler)
    assert scheduler.next_batch(1000 * ABANDONED_AFTER_S) is None
    scheduler.grant_credit("peer", "paused", 5)
    assert [emission.message.position for emission in step(scheduler)] == [5]


@pytest.mark.parametrize(
    ("tokens", "answer", "message", "param"),
    [
        (90, 20, "90 tokens and up to 20 more exceed the context of 100; at", "max_tokens"),
        (90, 20, "max_tokens may be up to 10 with this prompt", "max_tokens"),
        (100, 1, "100 tokens and up to 1 more exceed the context of 100; .*nothing", "prompt"),
    ],
)
def test_a_request_beyond_the_context_is_rejected_with_numbers(
    tokens: int, answer: int, message: str, param: str
) -> None:
    scheduler = Scheduler(limits(max_model_len=100), 1)
    with pytest.raises(ContextTooLong, match=message) as caught:
        submit(scheduler, request("a", tokens, answer))
    assert caught.value.param == param


def test_a_request_beyond_the_kv_cache_is_rejected_with_the_limit() -> None:
    scheduler = Scheduler(limits(num_blocks=12, max_model_len=100), 1)
    with pytest.raises(ContextTooLong) as caught:
        submit(scheduler, request("a", 30, 20))
    assert str(caught.value) == (
        "30 tokens and up to 20 more exceed the pipeline's KV cache of 48 tokens; at most 49 tokens"
        " fit, prompt and answer together: max_tokens may be up to 19 with this prompt"
    )
    submit(scheduler, request("a", 30, 19))
    with pytest.raises(ContextTooLong, match="nothing can be generated"):
        submit(scheduler, request("b", 49, 1))


def test_the_largest_fitting_request_is_served() -> None:
    scheduler = Scheduler(limits(num_blocks=12, max_model_len=100), 1)
    submit(scheduler, request("a", 30, 19))
    emitted = [emission for _ in range(40) for emission in step(scheduler)]
    assert len(emitted) == 19
    assert is_empty(scheduler)


@pytest.mark.parametrize(
    "changes", [{"tokens": 0}, {"prompt_tokens": 0}, {"answer": 0}, {"credit_window": 0}]
)
def test_fields_out_of_range_are_rejected(changes: dict[str, int]) -> None:
    fields = {"tokens": 3, "prompt_tokens": 3, **changes}
    with pytest.raises(RequestError):
        submit(Scheduler(limits(), 1), request("a", **fields))


def test_a_key_in_use_is_rejected() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 3))
    with pytest.raises(RequestError, match="already"):
        submit(scheduler, request("a", 3))


# --- reports -------------------------------------------------------------------------------------


def test_counters_and_gauges() -> None:
    scheduler = Scheduler(limits(num_blocks=10), 1)
    submit(scheduler, request("a", 5, 2), request("b", 3, 2))
    step(scheduler)
    counters, gauges = scheduler.collect_stats()
    assert counters == {
        "scheduler_requests_total": 2.0,
        "scheduler_admitted_total": 2.0,
        "scheduler_queue_seconds_total": 0.0,
        "scheduler_tokens_total": 2.0,
        "scheduler_finished_total": 0.0,
        "scheduler_cancelled_total": 0.0,
        "scheduler_displaced_total": 0.0,
        "scheduler_refused_total": 0.0,
        "scheduler_late_total": 0.0,
        "scheduler_expired_total": 0.0,
        "scheduler_failed_total": 0.0,
        "scheduler_volumes_total": 1.0,
        "scheduler_iterations_total": 1.0,
        "scheduler_prompt_tokens_total": 8.0,
        "scheduler_prefill_rows_total": 8.0,
        "scheduler_preemptions_total": 0.0,
        "scheduler_swaps_out_total": 0.0,
        "scheduler_swaps_in_total": 0.0,
        "scheduler_swap_fallbacks_total": 0.0,
        "scheduler_draft_tokens_total": 0.0,
        "scheduler_draft_tokens_accepted_total": 0.0,
        "scheduler_draft_model_tokens_total": 0.0,
        "scheduler_draft_model_seconds_total": 0.0,
        "scheduler_prefix_hit_tokens_total": 0.0,
        "scheduler_prefix_lookup_tokens_total": 8.0,
        "scheduler_prefix_evictions_total": 0.0,
        "scheduler_strays_total": 0.0,
    }
    assert gauges == {
        "scheduler_blocks": 10.0,
        "scheduler_blocks_used": 3.0,
        "scheduler_blocks_releasing": 0.0,
        "scheduler_blocks_free": 7.0,
        "scheduler_blocks_cached": 0.0,
        "scheduler_prefix_hit_rate": 0.0,
        "scheduler_host_blocks": 0.0,
        "scheduler_host_blocks_used": 0.0,
        "scheduler_swapped": 0.0,
        "scheduler_micro_batches": 2.0,
        "scheduler_running": 2.0,
        "scheduler_waiting": 0.0,
        "scheduler_clients": 1.0,
        "scheduler_decode_in_flight": 0.0,
        "scheduler_prefill_in_flight": 0.0,
        "scheduler_prefill_rows_in_flight": 0.0,
        "scheduler_cancel_iterations_last": 0.0,
        "scheduler_cancel_iterations_max": 0.0,
        "scheduler_swapped_resume_seconds": 0.0,
    }


def test_a_broken_invariant_carries_the_transition_log() -> None:
    scheduler = Scheduler(limits(), 1)
    submit(scheduler, request("a", 5))
    scheduler.next_batch(0.0)
    scheduler._queues.find_request("peer", "a").blocks.pop()
    with pytest.raises(InvariantError) as caught:
        scheduler.validate()
    assert any("submit peer a 5" in line for line in caught.value.story)


# --- notifications --------------------------------------------------------------------------------


def test_the_load_report_describes_requests() -> None:
    scheduler = Scheduler(limits(max_num_seqs=1), 1)
    scheduler.submit_request(request("a", 10, peer="pc-a"), 5.0)
    scheduler.submit_request(request("b", 3, peer="x" * 99), 6.0)
    first, _ = scheduler.next_batch(5.0), scheduler.next_batch(5.0)
    back(scheduler, volumes(first)[0])
    load = scheduler.report_load("p1", 7.0)
    assert (load.pipeline, load.running, load.waiting) == ("p1", 1, 1)
    assert (load.blocks, load.micro_batches, load.used_blocks > 0) == (64, 2, True)
    assert load.requests == (
        RequestLoad("pc-a", "prefill", 10, 8, 0, 0, 2),
        RequestLoad("x" * 32, "waiting", 3, 0, 0, 0, 1),
    )


def test_the_token_rate_counts_from_the_first_token() -> None:
    scheduler = Scheduler(limits(), 1)
    scheduler.submit_request(request("a", 3), 0.0)
    now = 10.0
    for _ in range(5):
        batch = scheduler.next_batch(now)
        (volume,) = volumes(batch)
        rows = volume.slices[0]
        choice = SampledId(rows.request, rows.start + rows.count, 50)
        scheduler.on_sampled(SamplerOutput(volume.seq, (choice,)), {}, now)
        now += 0.5
    (told,) = scheduler.report_load("p1", 12.0).requests
    assert (told.state, told.prompt, told.computed, told.generated) == ("decode", 3, 7, 5)
    assert told.token_rate == 2000, "four tokens in two seconds"


def test_the_load_report_is_bounded() -> None:
    scheduler = Scheduler(limits(max_queue_len=64), 1)
    submit(scheduler, *(request(f"r{number}", 3) for number in range(40)))
    load = scheduler.report_load("p1", 0.0)
    assert len(load.requests) == MAX_REQUESTS
    assert load.running + load.waiting == 40


def test_a_grammar_is_sent_once_with_the_answer_so_far() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=64), 1)
    submit(scheduler, request("a", 3, grammar=b"abc"))
    batch = scheduler.next_batch(0.0)
    admit, grammar = batch.controls
    assert grammar.body == Grammar(2, admit.body.request, Payload("u8", (3,)))
    assert (grammar.payload, volumes(batch)[0].slices[0].after_seq) == (b"abc", 2)
    again = Scheduler(limits(max_num_batched_tokens=64), 2)
    submit(again, request("a", 5, grammar=b"abc", prompt_tokens=3))
    _, grammar, history = again.next_batch(0.0).controls
    assert isinstance(grammar.body, Grammar)
    assert isinstance(history.body, History)
    assert (history.body.first, history.ids) == (0, tuple(range(5)))
