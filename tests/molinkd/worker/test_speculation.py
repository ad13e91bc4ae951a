"""Real stages in a ring without processes: answers do not depend on the drafts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load, save_file

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS, DraftBatch, DraftModelFacts, DraftResults
from molink.facts.profile import Profile
from molink.ring.step import StepInput, StepResult
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.speculation.base import DraftProposal
from molink.scheduler.speculation.prompt_lookup import PromptLookup
from molink.sim.event_queue import EventQueue
from molink.stage.stage import Stage
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken
from molinkd.worker.draft_proposer import DraftProposer
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step
from tests.support.models import add_draft_layer
from tests.support.request_states import make_state
from tests.support.rings import Stages, VirtualRing, WholeLink

STAGES, BLOCKS, BLOCK_SIZE = ((0, 1), (1, 2), (2, 3)), 64, 4
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.7, seed=5),
    "filtered": SamplingParams(temperature=0.9, top_k=40, top_p=0.8, min_p=0.02, seed=6),
    "penalties": SamplingParams(
        temperature=0.5, seed=7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4
    ),
    "logprobs": SamplingParams(temperature=0.4, seed=8, logprobs=3, logit_bias=((5, 3.0),)),
}


@dataclass
class Executor:
    """A stage and its requests."""

    queue: EventQueue
    stage: Stage
    requests: RequestTable

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        results = run_step(self.stage, self.requests, step_inputs)
        self.queue.schedule_at(self.queue.now + 0.01, done, StepResult(results, 0.01, None))


@dataclass
class Asked:
    """A draft model that takes a millisecond per token of its longest draft."""

    queue: EventQueue
    drafter: DraftProposer
    #: Most KV blocks that requests held at once.
    peak: int = 0

    def request_drafts(self, order: DraftBatch, done: Callable[[DraftResults], None]) -> None:
        guesses = self.drafter.propose_drafts(order)
        self.peak = max(self.peak, self.drafter.num_held_blocks)
        seconds = 0.001 * max((len(guess.tokens) for guess in guesses), default=0)
        self.queue.schedule_at(self.queue.now + seconds, done, DraftResults(guesses, seconds))


class Known:
    """Drafts the answers of a run without drafts, with a wrong token now and then."""

    def __init__(self, texts: Sequence[Sequence[int]], rng: random.Random) -> None:
        self._texts, self._rng = texts, rng

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        text = next(each for each in self._texts if list(each[: len(tokens)]) == list(tokens))
        drafts = list(text[len(tokens) : len(tokens) + self._rng.randint(1, count)])
        if drafts and self._rng.random() < 0.5:
            drafts[self._rng.randrange(len(drafts))] = self._rng.randrange(256)
        return DraftProposal(drafts)


@dataclass
class Right:
    """Drafts the continuation of ``text``."""

    text: Sequence[int]

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal(self.text[len(tokens) : len(tokens) + count])


@pytest.fixture(scope="module")
def folder(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder.open(make_model(tmp_path_factory.mktemp("speculation")))


@pytest.fixture(scope="module")
def stages(folder: ModelFolder) -> Sequence[Stage]:
    torch.set_num_threads(1)
    return [Stage.load_layers(folder, layers, "cpu", "f32") for layers in STAGES]


Answers = tuple[dict[str, list[OutputToken]], dict[str, float]]


@pytest.fixture(scope="module")
def undrafted(stages: Sequence[Stage]) -> Answers:
    """Answers without drafts."""
    return answers(stages, 0)


def prompts() -> list[tuple[int, ...]]:
    """Prompts of various lengths; most repeat themselves."""
    rng = random.Random(3)
    part = [rng.randrange(256) for _ in range(9)]
    return [(1, 2, 3, 4) * 4, (*part, 9, *part, 7, *part[:4]), (17,), tuple(part), (5, 6) * 11]


def answers(
    stages: Sequence[Stage],
    num_speculative_tokens: int,
    source: Callable[[], Any] = PromptLookup,
    samplings: Sequence[str] = tuple(SAMPLINGS),
    count: int = 24,
    asked: Sequence[int] = range(5),
    drafter: DraftProposer | None = None,
    **limits: Any,
) -> Answers:
    """Answers to the given prompts, and the scheduler's counters with the run's seconds."""
    queue, tables = EventQueue(), [RequestTable() for _ in stages]
    for stage in stages:
        stage.allocate_kv_pool(limits.get("num_blocks", BLOCKS), BLOCK_SIZE)
    pairs = zip(stages, tables, strict=True)
    given = {
        "num_blocks": BLOCKS,
        "block_size": BLOCK_SIZE,
        "micro_batches": 2,
        "max_num_batched_tokens": 16,
    }
    ring = VirtualRing(
        SchedulerConfig(**{**given, **limits}, num_speculative_tokens=num_speculative_tokens),
        [Executor(queue, stage, table) for stage, table in pairs],
        [WholeLink(queue) for _ in stages],
        Stages(stages[0].config.hidden_size, stages[0].config.vocab_size, "f32"),
        lambda index: tables[index],
        queue,
        source,
        None if drafter is None else Asked(queue, drafter),
    )
    found: dict[str, list[OutputToken]] = {}
    ring.on_emission = lambda emission, _: found.setdefault(emission.message.key, []).append(
        emission.message
    )
    given_prompts = prompts()
    for name in samplings:
        for index in asked:
            prompt = given_prompts[index]
            request = make_state(
                "d", f"{name} {index}", prompt, len(prompt), count, SAMPLINGS[name], (11,), 1 << 20
            )
            ring.scheduler.submit_request(request, 0.0)
    ring.rings[0].run_pending()
    ring.run_until(lambda: not ring.scheduler.live_requests)
    seconds = queue.now
    queue.run(queue.now + 1.0)
    ring.check_idle()
    return found, ring.scheduler.collect_stats()[0] | {"seconds": seconds}


def plain(found: dict[str, list[OutputToken]]) -> dict[str, list[Any]]:
    """Positions, tokens and finish reasons: logprobs depend on the batch in their last bits."""
    return {
        key: [(each.position, each.token, each.finish_reason) for each in tokens]
        for key, tokens in found.items()
    }


def test_lookups_change_no_answer(stages: Sequence[Stage], undrafted: Answers) -> None:
    without, _ = undrafted
    found, counters = answers(stages, 3)
    assert plain(found) == plain(without)
    assert counters["scheduler_draft_tokens_total"] > 20
    for key, tokens in found.items():
        for token, other in zip(tokens, without[key], strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-4, nan_ok=True)
            assert [pair[0] for pair in token.top] == [pair[0] for pair in other.top]


@pytest.mark.parametrize(("num_speculative_tokens", "ahead"), [(1, 0), (MAX_DRAFTS, 0), (2, 3)])
def test_drafts_that_are_often_right_change_no_answer(
    stages: Sequence[Stage], undrafted: Answers, num_speculative_tokens: int, ahead: int
) -> None:
    without, before = undrafted
    texts = [
        [*prompts()[int(key[-1])], *(token.token for token in tokens)]
        for key, tokens in without.items()
    ]
    rng = random.Random(4)
    found, counters = answers(
        stages, num_speculative_tokens, lambda: Known(texts, rng), lookahead_volumes=ahead
    )
    assert plain(found) == plain(without)
    drafted = counters["scheduler_draft_tokens_total"]
    accepted = counters["scheduler_draft_tokens_accepted_total"]
    assert 50 < accepted < drafted
    if not ahead:
        assert counters["scheduler_volumes_total"] < 0.8 * before["scheduler_volumes_total"]


def test_lookahead_drafts_save_round_trips(stages: Sequence[Stage]) -> None:
    # A round trip takes 45 ms.
    only: Any = {"samplings": ["penalties"], "asked": [0]}
    without, alone = answers(stages, 0, **only)
    text = [*prompts()[0], *(token.token for token in without["penalties 0"])]
    told: dict[int, float] = {}
    for ahead in (0, 8):
        found, counters = answers(stages, 2, lambda: Right(text), lookahead_volumes=ahead, **only)
        assert plain(found) == plain(without)
        told[ahead] = counters["seconds"]
    assert told[8] < 0.7 * told[0] < 0.7 * 0.6 * alone["seconds"]


def test_few_blocks_and_drafts(stages: Sequence[Stage]) -> None:
    without, _ = answers(stages, 0, samplings=["penalties", "greedy"])
    found, counters = answers(stages, 5, samplings=["penalties", "greedy"], num_blocks=14)
    assert plain(found) == plain(without)
    assert counters["scheduler_preemptions_total"] > 0
    assert counters["scheduler_draft_tokens_accepted_total"] > 0


# --- a draft model --------------------------------------------------------------------------------

#: A stage's step takes 10 ms, and a draft model's pass 1 ms.
STAGE = Profile(decode=((1, 0.010), (64, 0.012)), prefill=((16, 0.010), (64, 0.020)))
SMALL = DraftModelFacts(Profile(decode=((1, 0.001),), prefill=((16, 0.001), (64, 0.002))), 64)


def draft_model(folder: ModelFolder, stages: Sequence[Stage], **answered: Any) -> Answers:
    """Answers with all layers of ``folder`` as draft model, which frees all its KV blocks."""
    whole = Stage.load_layers(folder, (0, folder.config.layers), "cpu", "f32")
    drafter = DraftProposer(whole, 40, BLOCK_SIZE, stages[0].config.vocab_size)
    found = answers(stages, drafter=drafter, profiles=(STAGE,) * 3, draft_model=SMALL, **answered)
    drafter.propose_drafts(DraftBatch(finished=range(len(found[0]))))
    assert drafter.num_held_blocks == 0
    return found


@pytest.mark.parametrize("num_speculative_tokens", [2, AUTO_DRAFTS])
def test_correct_drafts_change_no_answer(
    folder: ModelFolder,
    stages: Sequence[Stage],
    undrafted: Answers,
    num_speculative_tokens: int,
) -> None:
    without, _ = undrafted
    _, lookups = answers(stages, num_speculative_tokens, profiles=(STAGE,) * 3)
    found, counters = draft_model(folder, stages, num_speculative_tokens=num_speculative_tokens)
    assert plain(found) == plain(without)
    assert counters["scheduler_draft_model_tokens_total"] > 20
    accepted = "scheduler_draft_tokens_accepted_total"
    # With this many streams the automatic count asks for few drafts.
    if num_speculative_tokens != AUTO_DRAFTS:
        assert counters[accepted] > 1.5 * lookups[accepted]


def test_a_draft_model_saves_round_trips(folder: ModelFolder, stages: Sequence[Stage]) -> None:
    only: Any = {"samplings": ["greedy"], "asked": [2]}
    without, before = answers(stages, 0, **only)
    found, counters = draft_model(folder, stages, num_speculative_tokens=AUTO_DRAFTS, **only)
    assert plain(found) == plain(without)
    assert counters["seconds"] < 0.65 * before["seconds"]


@pytest.mark.parametrize("num_speculative_tokens", [2, AUTO_DRAFTS])
def test_wrong_drafts_change_no_answer(
    make_model: Any,
    tmp_path: Any,
    stages: Sequence[Stage],
    undrafted: Answers,
    num_speculative_tokens: int,
) -> None:
    without, before = undrafted
    other = ModelFolder.open(make_model(tmp_path, seed=9))
    found, counters = draft_model(other, stages, num_speculative_tokens=num_speculative_tokens)
    assert plain(found) == plain(without)
    assert (
        counters["scheduler_draft_tokens_accepted_total"]
        < 0.5 * counters["scheduler_draft_tokens_total"]
    )
    if num_speculative_tokens == AUTO_DRAFTS:
        assert counters["seconds"] < 1.05 * before["seconds"]


def test_a_draft_model_with_few_blocks_changes_no_answer(
    folder: ModelFolder, stages: Sequence[Stage]
) -> None:
    only: Any = {"samplings": ["penalties", "greedy"], "num_blocks": 14}
    without, _ = answers(stages, 0, samplings=only["samplings"])
    found, counters = draft_model(folder, stages, num_speculative_tokens=3, **only)
    assert plain(found) == plain(without)
    assert counters["scheduler_preemptions_total"] > 0


# --- multi-token prediction -----------------------------------------------------------------------

#: The stages' profile; another MTP draft takes 1 ms.
LAST_STAGE = msgspec.structs.replace(STAGE, mtp_s=0.001)


class NoDrafts:
    """Proposes none, so that only the last stage drafts."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal()


def mtp_drafts(stages: Sequence[Stage], drafts: int, **asked: Any) -> Answers:
    profiles = (STAGE, STAGE, LAST_STAGE)
    return answers(stages, drafts, asked.pop("source", NoDrafts), profiles=profiles, **asked)


@pytest.fixture(scope="module")
def random_mtp(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Stage]:
    made = add_draft_layer(make_model(tmp_path_factory.mktemp("random"), "glm4_moe"))
    folder = ModelFolder.open(made)
    return [Stage.load_layers(folder, layers, "cpu", "f32") for layers in STAGES]


@pytest.fixture(scope="module")
def random_undrafted(random_mtp: Sequence[Stage]) -> Answers:
    return answers(random_mtp, 0, count=12)


@pytest.fixture(scope="module")
def right_mtp(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Stage]:
    """A model whose next token depends only on the last one, so that its MTP layer predicts it."""
    made = make_model(tmp_path_factory.mktemp("right"), "glm4_moe", first_k_dense_replace=4)
    path = add_draft_layer(made) / "model.safetensors"
    tensors = load(path.read_bytes())
    for name, tensor in tensors.items():
        inner, _, layer = name.partition("layers.")
        if inner and layer and (name.endswith("o_proj.weight") or layer[0] in "12"):
            if not name.endswith("norm.weight"):
                tensor.zero_()
        elif layer.startswith("3.") and (same := f"model.layers.0.{layer[2:]}") in tensors:
            tensors[name] = tensors[same].clone()
    table = tensors["model.embed_tokens.weight"]
    table /= table.pow(2).mean(dim=1, keepdim=True).sqrt()
    added, hidden = "model.layers.3.", table.shape[1]
    for norm in ("enorm", "hnorm"):
        tensors[f"{added}{norm}.weight"].fill_(1.0)
    tensors[f"{added}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[f"{added}eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
    save_file(tensors, path, {"format": "pt"})
    folder = ModelFolder.open(made)
    return [Stage.load_layers(folder, layers, "cpu", "f32") for layers in STAGES]


@pytest.fixture(scope="module")
def right_undrafted(right_mtp: Sequence[Stage]) -> Answers:
    return answers(right_mtp, 0, asked=(0, 1, 2))


@pytest.mark.parametrize(("count", "source"), [(3, NoDrafts), (AUTO_DRAFTS, PromptLookup)])
def test_mtp_drafts_change_no_answer(
    random_mtp: Sequence[Stage], random_undrafted: Answers, count: int, source: Any
) -> None:
    without, _ = random_undrafted
    found, counters = mtp_drafts(random_mtp, count, source=source, count=12)
    assert plain(found) == plain(without)
    assert counters["scheduler_draft_tokens_total"] > 20


@pytest.mark.parametrize("count", [1, 5, AUTO_DRAFTS])
def test_right_mtp_drafts_change_no_answer(
    right_mtp: Sequence[Stage], right_undrafted: Answers, count: int
) -> None:
    without, before = right_undrafted
    found, counters = mtp_drafts(right_mtp, count, asked=(0, 1, 2))
    assert plain(found) == plain(without)
    assert counters["scheduler_draft_tokens_accepted_total"] > 20
    assert counters["scheduler_volumes_total"] < before["scheduler_volumes_total"]


@pytest.mark.parametrize(("count", "ahead"), [(1, 0), (2, 3), (8, 0)])
def test_greedy_mtp_drafts_are_all_right(
    right_mtp: Sequence[Stage], count: int, ahead: int
) -> None:
    only: Any = {"samplings": ["greedy"], "asked": (1, 2)}
    without, before = answers(right_mtp, 0, **only)
    found, counters = mtp_drafts(right_mtp, count, lookahead_volumes=ahead, **only)
    assert plain(found) == plain(without)
    accepted = counters["scheduler_draft_tokens_accepted_total"]
    # Drafts beyond the end of an answer are not verified.
    assert counters["scheduler_draft_tokens_total"] - accepted < 3 * count
    assert counters["seconds"] < 0.75 * before["seconds"]


def test_few_blocks_and_mtp_drafts(right_mtp: Sequence[Stage]) -> None:
    only: Any = {"samplings": ["penalties", "greedy"]}
    without, _ = answers(right_mtp, 0, **only)
    found, counters = mtp_drafts(right_mtp, 5, num_blocks=14, **only)
    assert plain(found) == plain(without)
    assert counters["scheduler_preemptions_total"] > 0
    assert counters["scheduler_draft_tokens_accepted_total"] > 0
