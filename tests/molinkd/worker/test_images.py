"""Prompts with images in a ring of real stages without processes.

Answers are those of transformers, also with preemption, cancellations and prefix-cache hits.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.scheduler.request_state import RequestState
from molink.stage.stage import Stage
from molink.wire.messages.serving import Request
from molinkd.worker.image_encoder import ImageEncoder
from tests.molinkd.worker.test_states import ANSWER, GREEDY, States
from tests.support.models import MakeModel
from tests.support.sight import SeenPrompt, answer_reference, make_picture, make_seeing

SIZES = ((40, 24), (20, 50), (64, 64))
Prompts = dict[str, SeenPrompt]


class Sight(States):
    """A ring of multimodal stages; its scheduler gets what the receiver would have encoded."""

    def __init__(self, stages: Sequence[Stage], **limits: Any) -> None:
        config = stages[0].config
        slots, whole = 8 * config.keeps_states, config.sees_whole_images
        super().__init__(stages, **{"state_slots": slots, "whole_images": whole, **limits})
        self._encoder = ImageEncoder(stages[0])

    def ask(self, prompts: Prompts) -> None:
        """Submit prompts one after another."""
        for at, (key, prompt) in enumerate(prompts.items()):
            rows = self._encoder.encode_now(prompt.images)
            placed = {at: id for image in prompt.images for at, id in image.place_ids().items()}
            ids = tuple(placed.get(at, token) for at, token in enumerate(prompt.ids))
            request = Request("m", ids, ANSWER, GREEDY)
            spans = tuple(image.span for image in prompt.images)
            state = RequestState.from_request(
                request, "d", key, credit_window=1 << 20, image_spans=spans, image_rows=rows
            )
            when = self.queue.now + 0.01 * at
            self.queue.schedule_at(when, self.scheduler.submit_request, state, when)
            self.queue.schedule_at(when, self.ring.rings[0].run_pending)
            self.answers[key] = []


@pytest.fixture(
    scope="module",
    params=["smolvlm", "mistral3", "gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_5"],
)
def folder(request: pytest.FixtureRequest, make_model: MakeModel, tmp_path_factory: Any) -> Path:
    torch.set_num_threads(1)
    return make_seeing(make_model, tmp_path_factory.mktemp("sight") / "model", request.param)


@pytest.fixture(scope="module")
def stages(folder: Path) -> Sequence[Stage]:
    opened = ModelFolder.open(folder)
    first = opened.config.first_layers
    splits = (0, first), (first, first + 1), (first + 1, opened.config.layers)
    return [Stage.load_layers(opened, layers, "cpu", "f32") for layers in splits]


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Prompts:
    """Three questions, each with an image of its own and one that all share."""
    shared = make_picture(40, 40, 9)
    return {
        str(number): SeenPrompt.from_text(
            folder, f"@ is not @, {'so ' * number}why?", [shared, make_picture(*size, number)]
        )
        for number, size in enumerate(SIZES)
    }


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: Prompts) -> dict[str, list[int]]:
    return {key: answer_reference(folder, prompt, ANSWER) for key, prompt in prompts.items()}


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 7}], ids=["plenty", "chunks"])
def test_answers_are_those_of_transformers(
    stages: Sequence[Stage],
    prompts: Prompts,
    expected: dict[str, list[int]],
    limits: dict[str, Any],
) -> None:
    served = Sight(stages, num_blocks=256, **limits)
    served.ask(prompts)
    assert served.finish() == expected


def test_preempted_requests_see_again(
    stages: Sequence[Stage], prompts: Prompts, expected: dict[str, list[int]]
) -> None:
    longest = max(len(prompt.ids) for prompt in prompts.values())
    served = Sight(stages, num_blocks=(longest + ANSWER) // 4 + 12)
    served.ask(prompts)
    assert served.finish() == expected
    counters, _ = served.scheduler.collect_stats()
    assert counters["scheduler_preemptions_total"] >= 1


def test_images_are_cached_by_their_pixels(
    folder: Path, stages: Sequence[Stage], prompts: Prompts, expected: dict[str, list[int]]
) -> None:
    served = Sight(stages, num_blocks=256)
    served.ask({"0": prompts["0"]})
    assert served.finish() == {"0": expected["0"]}
    other = SeenPrompt.from_text(
        folder, "@ is not @, why?", [make_picture(40, 40, 8), make_picture(*SIZES[0], 0)]
    )
    served.ask({"same": prompts["0"], "1": prompts["1"], "other": other})
    answers = served.finish()
    assert answers["same"] == expected["0"]
    assert answers["1"] == expected["1"]
    assert answers["other"] == answer_reference(folder, other, ANSWER)
    shared = [image for image in prompts["0"].images if image in prompts["1"].images]
    after = prompts["1"].images[len(shared)].span
    assert served.cached["same"] >= len(prompts["0"].ids) - 4
    if stages[0].config.keeps_states:
        assert served.cached["1"] == 0, "no state was kept between its images"
    else:
        assert shared[-1].span.end - 4 < served.cached["1"] <= after.start + 4
    assert served.cached["other"] <= shared[0].span.start


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_no_state_is_kept_within_an_image_that_is_not_cut(
    folder: Path, stages: Sequence[Stage]
) -> None:
    """No model family has both.

    The prompts branch off in the last block of the first image's rows.
    """
    served = Sight(stages, num_blocks=256, whole_images=True, max_num_batched_tokens=30)
    shared = make_picture(40, 40, 9)
    asked = {
        str(number): SeenPrompt.from_text(
            folder, "@.@ why?", [shared, make_picture(24, 24, number)]
        )
        for number in range(3)
    }
    for key, prompt in asked.items():
        served.ask({key: prompt})
        served.finish()
    expected = {key: answer_reference(folder, prompt, ANSWER) for key, prompt in asked.items()}
    assert served.answers == expected
    assert served.cached["2"] == 0


def test_one_thread_encodes_what_is_still_wanted(stages: Sequence[Stage], prompts: Prompts) -> None:
    encoder, results = ImageEncoder(stages[0]), queue.SimpleQueue[tuple[str, Any, int]]()
    free = threading.Event()

    def encode(name: str, is_wanted: Callable[[], bool]) -> None:
        encoder.encode_images(
            prompts["0"].images,
            is_wanted,
            lambda done, rows: done((name, rows, threading.get_ident())),
            results.put,
        )

    encode("first", lambda: free.wait(60.0))
    for number in range(50):
        encode(str(number), lambda: False)
    encode("last", lambda: True)
    free.set()
    found = [results.get(timeout=60.0) for _ in range(52)]
    assert [name for name, rows, _ in found if not isinstance(rows, str)] == ["first", "last"]
    assert len({thread for *_, thread in found} - {threading.get_ident()}) == 1
