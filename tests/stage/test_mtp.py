"""Tokens predicted by an MTP layer equal those of a plain reference, whole and split."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen2 import modeling_qwen2 as qwen
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from molink.stage.batch import MtpInput, SequenceRows, StageInput
from tests.support.models import (
    ADD_ONE,
    MakeModel,
    add_draft_layer,
    make_mimo,
    name_qwen_drafts,
)
from tests.support.stage import BLOCK_SIZE, Reference, Ring

FAMILIES: dict[str, tuple[Any, Any]] = {
    "glm4_moe": (glm.Glm4MoeDecoderLayer, glm.Glm4MoeRotaryEmbedding),
    "deepseek_v3": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RotaryEmbedding),
    # MiMo's layer is one of Qwen2.
    "qwen2": (qwen.Qwen2DecoderLayer, qwen.Qwen2RotaryEmbedding),
    # The layer has attention, as every fourth of the others.
    "qwen3_next": (qwen3_next.Qwen3NextDecoderLayer, qwen3_next.Qwen3NextRotaryEmbedding),
    "qwen3_5_text": (qwen3_5.Qwen3_5DecoderLayer, qwen3_5.Qwen3_5TextRotaryEmbedding),
}
PROMPT, STEPS = 21, 3
BLOCKS = (5, 1, 6, 2, 9)


class PlainMtp:
    """The equations of DeepSeek-V3, §2.2, on whole sequences, without any cache.

    ``h'_i = M [RMSNorm(Emb(t_{i+1})); RMSNorm(h_i)]`` (in this order in DeepSeek's weights, in the
    other one in MiMo's), then a layer of the model, and the output head. ``h`` are rows after the
    model's last norm.
    """

    def __init__(self, folder: Path, family: str) -> None:
        layer_kind, rope_kind = FAMILIES[family]
        self.main = Reference(folder).model
        config = self.main.config
        number = config.num_hidden_layers
        prefix = f"model.layers.{number}."
        stored = load_file(folder / "model.safetensors")
        self.own = {
            name.removeprefix(prefix): tensor
            for name, tensor in stored.items()
            if name.startswith(prefix)
        }
        self.eps, self.row_first = config.rms_norm_eps, family == "qwen2"
        self.offset = float(family.startswith(ADD_ONE))
        # The number decides whether a layer has experts or attention; configs of Qwen don't know
        # this layer.
        known = getattr(config, "layer_types", None)
        if family.startswith("qwen"):
            number = 0 if known is None else known.index("full_attention")
        self.layer = layer_kind(config, number)
        self.layer.load_state_dict(_stack_experts(self.own, self.layer), strict=False)
        self.layer.eval()
        self.rope = rope_kind(config)

    def norm(self, rows: Tensor, name: str) -> Tensor:
        scaled = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled * (self.offset + self.own[f"{name}.weight"])

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int) -> list[Tensor]:
        """Logits of ``count`` tokens after ``tokens``, whose last one has no hidden row yet."""
        ids = torch.tensor(list(tokens))
        rows = self.main.model(ids[None, :-1]).last_hidden_state[0]
        after, found = ids[1:], list[Tensor]()
        for _ in range(count):
            embedded = self.main.model.embed_tokens(after)
            parts = [self.norm(embedded, "enorm"), self.norm(rows, "hnorm")]
            both = torch.cat(parts[::-1] if self.row_first else parts, dim=-1)
            joined = nn.functional.linear(both, self.own["eh_proj.weight"])[None]
            positions = torch.arange(len(rows))[None]
            mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
            angles = self.rope(joined, positions)
            result = self.layer(
                joined,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=angles,
            )
            result = result[0] if isinstance(result, tuple) else result
            last = self.norm(result[0, -1:], "shared_head.norm")
            found.append(self.main.lm_head(last)[0])
            rows = torch.cat([rows, last])
            after = torch.cat([after, found[-1].argmax()[None]])
        return found


def _stack_experts(own: dict[str, Tensor], layer: nn.Module) -> dict[str, Tensor]:
    """Weights in the layout of transformers' layer, whose experts are stacked."""
    state = dict(own)
    if not any(name.startswith("mlp.experts.") for name in own):
        return state
    count = 1 + max(int(name.split(".")[2]) for name in own if name.startswith("mlp.experts."))

    def of(expert: int, name: str) -> Tensor:
        return own[f"mlp.experts.{expert}.{name}_proj.weight"]

    experts = range(count)
    state["mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat([of(index, "gate"), of(index, "up")]) for index in experts]
    )
    state["mlp.experts.down_proj"] = torch.stack([of(index, "down") for index in experts])
    missing = {name for name, _ in layer.named_parameters()} - state.keys()
    assert not missing, missing
    return state


@dataclass
class Model:
    folder: Path
    plain: PlainMtp


@pytest.fixture(scope="module", params=FAMILIES)
def model(
    request: pytest.FixtureRequest, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    place = tmp_path_factory.mktemp("mtp")
    folder = add_draft_layer(make_model(place / "plain", request.param, 3))
    plain = PlainMtp(folder, request.param)
    if request.param == "qwen2":
        # A copy, since the reference keeps the files mapped.
        folder = make_mimo(shutil.copytree(folder, place / "mimo"))
    elif request.param.startswith("qwen3"):
        folder = name_qwen_drafts(shutil.copytree(folder, place / "named"))
    return Model(folder, plain)


def prompt() -> list[int]:
    return torch.randint(256, (PROMPT + 1,), generator=torch.Generator().manual_seed(2)).tolist()


def drafts(ring: Ring, tokens: Sequence[int], chunk: int) -> list[Tensor]:
    """Logits of the last stage for the tokens after ``tokens``; prompts are run in chunks."""
    last, start = ring.stages[-1], 0
    while start < len(tokens) - 1:
        end = min(start + chunk, len(tokens) - 1)
        given: Tensor = torch.tensor(list(tokens[start:end]))
        rows = SequenceRows(start, end - start, BLOCKS)
        for stage in ring.stages:
            pair = (given, None) if stage.is_first else (None, given)
            output = stage.compute_step(StageInput(*pair, (rows,), ()))
            given = output.rows
        assert output.normed is not None
        made = last.predict_tokens(
            MtpInput(output.normed, tokens[start + 1 : end + 1], (rows,), (end - start - 1,))
        )
        start = end
    found = [made.logits[0]]
    for position in range(start, start + STEPS - 1):
        rows = SequenceRows(position, 1, BLOCKS)
        made = last.predict_tokens(MtpInput(made.normed, [int(found[-1].argmax())], (rows,), (0,)))
        found.append(made.logits[0])
    return found


@pytest.mark.parametrize(("splits", "chunk"), [((), PROMPT), ((1, 2), 8), ((2,), 1)])
def test_logits_ahead(model: Model, splits: Sequence[int], chunk: int) -> None:
    ring = Ring(model.folder, splits)
    tokens = prompt()
    expected = model.plain.draft(tokens, STEPS)
    for mine, theirs in zip(drafts(ring, tokens, chunk), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
        assert mine.argmax() == theirs.argmax()


def test_the_last_stage_has_kv_of_one_more_layer(model: Model) -> None:
    first, last = Ring(model.folder, (2,)).stages
    (whole,) = Ring(model.folder).stages
    assert (first.has_mtp, last.has_mtp) == (False, True)
    attended = [last.config.count_attention(stage.layers) for stage in (last, whole)]
    each = whole.block_bytes(BLOCK_SIZE) // (attended[1] + 1)
    assert last.block_bytes(BLOCK_SIZE) == each * (attended[0] + 1)


def test_models_without_an_mtp_layer_predict_nothing(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "glm4_moe", 0)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert written["num_nextn_predict_layers"] == 1
    (stage,) = Ring(folder).stages
    assert not stage.has_mtp
