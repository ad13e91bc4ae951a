"""Experts that partly are in host memory give the same results as on the device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import UsageError
from molink.stage.batch import SequenceRows
from molink.stage.decoder.expert_use import ExpertUse
from molink.stage.decoder.split_experts import SplitExpertMlp
from molink.stage.stage import Stage
from tests.support.models import MakeModel
from tests.support.stage import Ring

BLOCKS = tuple(range(8))
#: With a shared expert that a gate weights; with a first layer without experts; with experts chosen
#: in turn, or with scaled inputs; and with latents in a layer without attention.
FAMILIES = (
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "qwen2_moe",
    "glm4_moe",
    "phimoe",
    "llama4_text",
    "nemotron_h",
)


def find_split(ring: Ring) -> list[SplitExpertMlp]:
    return [one for stage in ring.stages for one in stage._decoder.split_experts]


def run_steps(ring: Ring, tokens: list[int]) -> torch.Tensor:
    """Logits of a prompt in chunks, then of single rows, then of two requests together."""
    steps = [(0, 7), (7, 4), (11, 1), (12, 1)]
    logits = [
        ring.run(tokens[at : at + count], [SequenceRows(at, count, BLOCKS[:4])])
        for at, count in steps
    ]
    both = [SequenceRows(13, 1, BLOCKS[:4]), SequenceRows(0, 3, BLOCKS[4:])]
    return torch.cat([*logits, ring.run(tokens[13:14] + tokens[:3], both)])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_exactly_those_of_one_device(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    family: str,
) -> None:
    latents = {"moe_latent_size": 48} if family == "nemotron_h" else {}
    folder, tokens = make_model(tmp_path, family, **latents), random_tokens(16)
    expected = run_steps(make_ring(folder, (2,), states=4), tokens)
    experts = ModelFolder.open(folder).config.experts
    assert experts is not None
    count = experts.num_experts
    for moved in (1, count // 2, count):
        ring = make_ring(folder, (2,), states=4, host_experts=moved)
        assert {one.host.count for one in find_split(ring)} == {moved}
        assert torch.equal(run_steps(ring, tokens), expected)


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_quantized_experts(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    quantize: str,
) -> None:
    folder = make_model(tmp_path, "qwen3_moe", moe_intermediate_size=64, num_hidden_layers=2)
    tokens = random_tokens(16)
    expected = run_steps(make_ring(folder, (), quantize=quantize), tokens)
    ring = make_ring(folder, (), quantize=quantize, host_experts=5)
    assert torch.equal(run_steps(ring, tokens), expected)


def test_experts_that_are_used_more_move_to_the_device(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    folder, tokens = make_model(tmp_path, "qwen3_moe"), random_tokens(16)
    expected = run_steps(make_ring(folder), tokens)
    ring = make_ring(folder, host_experts=6)
    (stage,) = ring.stages
    assert not stage.swap_next_experts()  # no choices are recorded yet
    one, prompt = tokens[3], [SequenceRows(0, 1, BLOCKS[:4])]
    for _ in range(40):  # always the same three experts
        ring.run([one], prompt)
    before = stage.resident_share
    swaps = 0
    while stage.swap_next_experts():
        swaps += 1
    assert 0 < swaps <= 2 * len(find_split(ring))  # two experts are on the device
    assert stage.resident_share == pytest.approx(2 / 3)
    assert before < 2 / 3
    assert torch.equal(run_steps(ring, tokens), expected)
    for split in find_split(ring):
        assert sorted(split.ranks.tolist()) == list(range(8))


def test_use_is_forgotten_and_small_differences_move_nothing() -> None:
    use = ExpertUse(4, 2)
    assert use.resident_share == 0.0
    use.record_choices(torch.tensor([10, 20, 24, 5]))
    assert use.find_swap() is None  # 14 more choices are too few
    use.record_choices(torch.tensor([0, 0, 2, 0]))
    assert use.find_swap() == (0, 2)
    use.swap_places(0, 2)
    assert use.resident_share == pytest.approx(46 / 61)
    assert use.find_swap() is None
    for _ in range(40):
        use.record_choices(torch.tensor([0, 0, 0, 100]))
    assert use.find_swap() == (1, 3)
    assert ExpertUse(4, 0).find_swap() is None
    assert ExpertUse(4, 4).find_swap() is None


def test_bytes_are_counted_by_their_device(make_model: MakeModel, tmp_path: Path) -> None:
    folder = ModelFolder.open(make_model(tmp_path, "qwen3_moe"))
    whole = Stage.load_layers(folder, (0, 2), dtype="f32")
    split = Stage.load_layers(folder, (0, 2), dtype="f32", host_experts=6)
    assert whole.host_expert_bytes == 0
    assert split.host_expert_bytes > 0
    assert split.weight_bytes + split.host_expert_bytes == whole.weight_bytes
    assert (whole.host_experts, split.host_experts) == (0, 6)


@pytest.mark.parametrize(("family", "count"), [("qwen3_moe", 9), ("qwen3_moe", -1), ("llama", 1)])
def test_experts_that_are_not_there_are_refused(
    make_model: MakeModel, tmp_path: Path, family: str, count: int
) -> None:
    folder = ModelFolder.open(make_model(tmp_path, family))
    with pytest.raises(UsageError, match="can't lie in host memory: the model has"):
        Stage.load_layers(folder, (0, 1), dtype="f32", host_experts=count)
