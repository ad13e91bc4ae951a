"""Models with a recurrent state per request, in a ring of real stages without processes.

Answers are those of transformers, also with preemption, cancellations and prefix-cache hits.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import UsageError
from molink.facts.drafts import MAX_DRAFTS
from molink.ring.step import BlockCopy, StepInput, StepResult
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.speculation.prompt_lookup import PromptLookup
from molink.sim.event_queue import EventQueue
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step
from tests.molinkd.worker.test_speculation import LAST_STAGE, STAGE, Known, NoDrafts
from tests.support.models import MakeModel, add_draft_layer, name_qwen_drafts
from tests.support.request_states import make_state
from tests.support.rings import Stages, VirtualRing, WholeLink
from tests.support.stage import Reference

SPLITS = ((0, 1), (1, 3), (3, 4))
BLOCK_SIZE, ANSWER = 4, 32
GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (3, 41, 8, 22, 1, 30)
FAMILIES = (
    "qwen3_next",
    "qwen3_5_text",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "kimi_linear",
    "falcon_h1",
)
#: Limits of a scheduler; each family runs with two of them.
LIMITS: tuple[dict[str, int], ...] = (
    {},
    {"max_num_batched_tokens": 7},
    {"state_slots": 1, "max_num_seqs": 1},
    {"state_slots": 2},
)
Prompts = dict[str, tuple[int, ...]]


@dataclass
class Computes:
    """A stage and its requests; steps take no time."""

    queue: EventQueue
    stage: Stage
    requests: RequestTable

    def submit_step(
        self, segments: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        results = run_step(self.stage, self.requests, segments)
        self.queue.schedule_at(self.queue.now + 0.01, done, StepResult(results, 0.01, None))

    def submit_copy(self, copy: BlockCopy) -> None:
        raise AssertionError("states are not swapped")


class States:
    """A ring of stages that serves at once."""

    def __init__(
        self,
        stages: Sequence[Stage],
        source: Callable[[], Any] = PromptLookup,
        sampling: SamplingParams = GREEDY,
        **limits: Any,
    ) -> None:
        self._sampling = sampling
        self.queue, tables = EventQueue(), [RequestTable() for _ in stages]
        given = {"num_blocks": 96, "block_size": BLOCK_SIZE, "micro_batches": 2}
        given |= {"max_num_batched_tokens": 16, "state_slots": 8, "min_snapshot_rows": 4}
        bounds = SchedulerConfig(**given | limits)
        for stage in stages:
            stage.allocate_kv_pool(bounds.num_blocks, BLOCK_SIZE, bounds.state_slots)
        self.ring = VirtualRing(
            bounds,
            [Computes(self.queue, *pair) for pair in zip(stages, tables, strict=True)],
            [WholeLink(self.queue) for _ in stages],
            Stages(stages[0].config.hidden_size, stages[0].config.vocab_size, "f32"),
            lambda index: tables[index],
            self.queue,
            source,
        )
        self.ring.on_emission = lambda emission, _: self._keep(emission.message)
        self.answers: dict[str, list[int]] = {}
        #: Tokens of each prompt that were found in the prefix cache.
        self.cached: dict[str, int] = {}

    @property
    def scheduler(self) -> Any:
        return self.ring.scheduler

    def submit(self, asked: Prompts) -> None:
        for at, (key, prompt) in enumerate(asked.items()):
            state = make_state("d", key, prompt, len(prompt), ANSWER, self._sampling, (), 1 << 20)
            when = self.queue.now + 0.01 * at
            self.queue.schedule_at(when, self.scheduler.submit_request, state, when)
            self.queue.schedule_at(when, self.ring.rings[0].run_pending)
            self.answers[key] = []

    def finish(self) -> dict[str, list[int]]:
        self.ring.run_until(lambda: not self.scheduler.live_requests and all(self.answers.values()))
        self.queue.run(self.queue.now + 1.0)
        self.ring.check_idle()
        self.scheduler.validate()
        return self.answers

    def _keep(self, message: Any) -> None:
        assert isinstance(message, OutputToken), message
        if not self.answers[message.key]:
            self.cached[message.key] = message.cached_tokens
        self.answers[message.key].append(message.token)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, make_model: MakeModel, tmp_path_factory: Any) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("states"), family, 3)


@pytest.fixture(scope="module")
def stages(folder: Path) -> Sequence[Stage]:
    opened = ModelFolder.open(folder)
    return [Stage.load_layers(opened, layers, "cpu", "f32") for layers in SPLITS]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    rng = random.Random(3)
    return {
        str(number): tuple(rng.randrange(256) for _ in range(length))
        for number, length in enumerate(LENGTHS)
    }


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: Prompts) -> dict[str, list[int]]:
    reference = Reference(folder)
    return {key: reference.generate(prompt, ANSWER) for key, prompt in prompts.items()}


@pytest.mark.parametrize("turn", range(2))
def test_answers_are_those_of_transformers(
    family: str,
    stages: Sequence[Stage],
    prompts: Prompts,
    expected: dict[str, list[int]],
    turn: int,
) -> None:
    served = States(stages, **LIMITS[(FAMILIES.index(family) + 2 * turn) % len(LIMITS)])
    served.submit(prompts)
    assert served.finish() == expected


def test_preempted_requests_are_recomputed(
    stages: Sequence[Stage], prompts: Prompts, expected: dict[str, list[int]]
) -> None:
    served = States(stages, num_blocks=24)
    served.submit(prompts)
    assert served.finish() == expected
    counters, _ = served.scheduler.collect_stats()
    assert counters["scheduler_preemptions_total"] >= 2


def test_a_cancelled_request_leaves_its_state_to_others(
    stages: Sequence[Stage], prompts: Prompts, expected: dict[str, list[int]]
) -> None:
    served = States(stages, state_slots=2)
    served.submit({"gone": prompts["1"][::-1]} | prompts)
    served.ring.run_until(lambda: len(served.answers["gone"]) == 3)
    served.scheduler.cancel_request("d", "gone", served.queue.now)
    served.ring.rings[0].run_pending()
    found = served.finish()
    assert len(found.pop("gone")) < ANSWER
    assert found == expected


def test_rows_run_between_the_layers_of_a_chunk(
    folder: Path, prompts: Prompts, expected: dict[str, list[int]]
) -> None:
    stage = Stage.load_layers(ModelFolder.open(folder), (0, 4), "cpu", "f32")
    stage.allocate_kv_pool(64, 8)
    chunk, other, answer = prompts["1"], prompts["5"], list[int]()

    def run(tokens: Sequence[int], start: int, slot: int, between: Any = None) -> int:
        blocks = range(20 * slot, 20 * slot + 20)
        rows = (SequenceRows(start, len(tokens), blocks, state_slot=slot),)
        batch = StageInput(torch.tensor(tokens), None, rows, (len(tokens) - 1,))
        return int(stage.compute_step(batch, between).rows[0].argmax())

    def decode() -> None:
        start = len(other) + len(answer) - 1
        answer.append(run(answer[-1:], start, 0))

    answer.append(run(other, 0, 0))
    first = run(chunk[:30], 0, 1, decode), run(chunk[30:], 30, 1, decode)
    assert first[1] == expected["1"][0]
    assert answer == expected["5"][:7]


def test_a_chat_is_continued_from_its_state(stages: Sequence[Stage], folder: Path) -> None:
    """Each turn computes only its new tokens; a repeated one starts from its prompt's snapshot."""
    served, reference = States(stages), Reference(folder)
    rng, prompt, cached = random.Random(7), list[int](), list[int]()
    for turn in range(3):
        prompt += [rng.randrange(256) for _ in range(13)]
        key = f"turn {turn}"
        served.submit({key: tuple(prompt)})
        assert served.finish()[key] == reference.generate(tuple(prompt), ANSWER)
        cached.append(served.cached[key])
        if turn < 2:
            prompt += served.answers[key]
    assert cached == [0, 13 + ANSWER - 1, 2 * (13 + ANSWER) - 1]
    served.submit({"again": tuple(prompt)})
    assert served.finish()["again"] == served.answers["turn 2"]
    assert served.cached["again"] == len(prompt) // BLOCK_SIZE * BLOCK_SIZE


def test_a_shared_beginning_is_computed_until_its_state_is_kept(
    stages: Sequence[Stage], folder: Path
) -> None:
    """The second request shows where others branch off; later ones start there at once."""
    served, reference, rng = States(stages), Reference(folder), random.Random(8)
    system = [rng.randrange(256) for _ in range(22)]
    asked = {
        key: (*system, number, *(rng.randrange(256) for _ in range(6)))
        for number, key in enumerate("abcde")
    }
    for keys in ("a", "b", "cde"):
        served.submit({key: asked[key] for key in keys})
        served.finish()
    assert [served.cached[key] for key in "abcde"] == [0, 0, 20, 20, 20]
    expected = {key: reference.generate(prompt, ANSWER) for key, prompt in asked.items()}
    assert served.answers == expected


def test_repeated_prompts_share_few_slots(
    stages: Sequence[Stage], prompts: Prompts, expected: dict[str, list[int]]
) -> None:
    """Requests are preempted and snapshots dropped for others, but no answer changes."""
    served = States(stages, num_blocks=28, state_slots=5, min_snapshot_rows=1)
    for turn in "ab":  # the last prompts first, before their snapshots are evicted
        served.submit({f"{turn}{key}": prompts[key] for key in sorted(prompts, reverse=turn > "a")})
        served.finish()
    for turn in "ab":
        assert {key: served.answers[f"{turn}{key}"] for key in prompts} == expected
    counters, _ = served.scheduler.collect_stats()
    assert counters["scheduler_preemptions_total"]
    assert any(served.cached.values())


#: Sampled by position, so that a state with a wrong row shows.
SAMPLED = SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("drafts", "sampling", "limits"),
    [
        (MAX_DRAFTS, GREEDY, {"num_blocks": 192, "state_slots": 16}),
        (4, SAMPLED, {"num_blocks": 28, "state_slots": 5, "max_num_batched_tokens": 7}),
    ],
    ids=["greedy and cached", "sampled and preempted"],
)
def test_drafts_change_no_answer(
    stages: Sequence[Stage],
    prompts: Prompts,
    drafts: int,
    sampling: SamplingParams,
    limits: dict[str, Any],
) -> None:
    """Drafts are often right; prompts come twice, the second time after what is cached."""
    plain = States(stages, sampling=sampling)
    plain.submit(prompts)
    expected, rng = plain.finish(), random.Random(drafts)
    texts = [[*prompt, *expected[key]] for key, prompt in prompts.items()]
    served = States(
        stages, lambda: Known(texts, rng), sampling, num_speculative_tokens=drafts, **limits
    )
    for turn in "ab":
        served.submit({f"{turn}{key}": prompt for key, prompt in prompts.items()})
        served.finish()
    for turn in "ab":
        assert {key: served.answers[f"{turn}{key}"] for key in prompts} == expected
    counters, _ = served.scheduler.collect_stats()
    drafted = counters["scheduler_draft_tokens_total"]
    assert 50 < counters["scheduler_draft_tokens_accepted_total"] < drafted
    if limits["num_blocks"] > 28:
        assert any(served.cached[f"b{key}"] for key in prompts)
    else:
        assert counters["scheduler_preemptions_total"]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_mtp_drafts_change_no_answer(
    make_model: MakeModel,
    tmp_path: Path,
    prompts: Prompts,
    family: str,
    sampling: SamplingParams,
) -> None:
    folder = name_qwen_drafts(add_draft_layer(make_model(tmp_path, family, 3)))
    opened = ModelFolder.open(folder)
    stages = [Stage.load_layers(opened, layers, "cpu", "f32") for layers in SPLITS]
    assert stages[-1].has_mtp
    plain = States(stages, sampling=sampling)
    plain.submit(prompts)
    expected = plain.finish()
    served = States(
        stages,
        NoDrafts,
        sampling,
        num_speculative_tokens=3,
        profiles=(STAGE, STAGE, LAST_STAGE),
    )
    served.submit(prompts)
    assert served.finish() == expected
    drafted = served.scheduler.collect_stats()[0]["scheduler_draft_tokens_total"]
    assert drafted > 5 * ANSWER


def test_a_chat_with_drafts_is_continued_from_its_state(
    stages: Sequence[Stage], folder: Path
) -> None:
    """The state after an answer includes its drafts that were right."""
    reference, rng, texts = Reference(folder), random.Random(7), list[list[int]]()
    served = States(stages, lambda: Known(texts, rng), num_speculative_tokens=6)
    prompt = list[int]()
    for turn in ("1", "2", "3"):
        prompt += [rng.randrange(256) for _ in range(9)]
        expected = reference.generate(tuple(prompt), ANSWER)
        texts.insert(0, [*prompt, *expected])
        served.submit({turn: tuple(prompt)})
        assert served.finish()[turn] == expected
        assert served.cached[turn] == max(0, len(prompt) - 10)
        prompt += expected
    counters, _ = served.scheduler.collect_stats()
    assert counters["scheduler_draft_tokens_accepted_total"] > ANSWER


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_speculative_tokens": 2, "lookahead_volumes": 1},
        {"preemption_mode": "reactive-swap"},
    ],
)
def test_unsupported_settings_of_states_are_refused(wrong: dict[str, Any]) -> None:
    limits = {"num_blocks": 8, "block_size": 4, "micro_batches": 1}
    with pytest.raises(UsageError, match="recurrent layers"):
        SchedulerConfig(**limits | {"state_slots": 2} | wrong)
