"""A layer for multi-token prediction (MTP), trained beside a finished model, in MiMo's layout.

It learns what the model would say next, from the model's own probabilities, for several tokens
ahead. As when it is used, it goes on from its own rows: the row for each further token attends to
rows of known tokens and to its own predecessors (the "training-time test" of EAGLE-3, arXiv
2503.01840, §3.2).
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2RMSNorm,
    apply_rotary_pos_emb,
)

from tools.demo_model.network import load_network
from tools.demo_model.tokenizer import load_tokenizer
from tools.demo_model.train import (
    Plan,
    make_batches,
    make_optimizers,
    make_samples,
    select_conversations,
    set_rate,
)

#: Tokens ahead that it learns, and the factor by which each counts less than the one before.
_AHEAD, _FADING = 3, 0.8
_PREFIX = "model.mtp_layers.0."


class MtpLayer(nn.Module):
    """The weights of MiMo's MTP layer."""

    def __init__(self, network: Qwen2ForCausalLM) -> None:
        super().__init__()
        config = network.config
        hidden = config.hidden_size
        self.token_layernorm = Qwen2RMSNorm(hidden, config.rms_norm_eps)
        self.hidden_layernorm = Qwen2RMSNorm(hidden, config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = Qwen2DecoderLayer(config, 0)
        # Initialized as the model's last layer.
        self.layer.load_state_dict(network.model.layers[-1].state_dict())
        self.final_layernorm = Qwen2RMSNorm(hidden, config.rms_norm_eps)
        self.final_layernorm.load_state_dict(network.model.norm.state_dict())

    def tensors(self) -> dict[str, Tensor]:
        """Its weights by their names in a checkpoint."""
        return {
            f"{_PREFIX}{name.removeprefix('layer.')}": tensor
            for name, tensor in self.state_dict().items()
        }


def predict_ahead(
    mtp_layer: MtpLayer, network: Qwen2ForCausalLM, rows: Tensor, ids: Tensor, ahead: int
) -> Iterator[Tensor]:
    """Rows ``[B, T, hidden]`` from which token ``i + 2``, then ``i + 3`` … follows row ``i``.

    ``rows`` are the model's after its last norm; ``ids`` ``[B, T + ahead]`` are its tokens.
    """
    count = rows.shape[1]
    keys, values = list[Tensor](), list[Tensor]()
    layer = mtp_layer.layer
    for step in range(ahead):
        embedded = network.model.embed_tokens(ids[:, step + 1 : step + 1 + count])
        both = [mtp_layer.hidden_layernorm(rows), mtp_layer.token_layernorm(embedded)]
        rows = mtp_layer.input_proj(torch.cat(both, dim=-1))
        positions = torch.arange(step, step + count)[None]
        angles = network.model.rotary_emb(rows, positions)
        attended = _attend(layer.self_attn, layer.input_layernorm(rows), angles, keys, values)
        rows = rows + attended
        rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
        rows = mtp_layer.final_layernorm(rows)
        yield rows


def _attend(
    attention: Any,
    normed: Tensor,
    angles: tuple[Tensor, Tensor],
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """Attention of row ``i`` to the first step's rows up to ``i``, and to its own of later steps.

    ``keys`` and ``values`` of all steps are ``[B, heads, T, head_dim]``; this step's are added.
    """
    shape = *normed.shape[:2], -1, attention.head_dim
    query, key, value = (
        projection(normed).view(shape).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *angles)
    groups = attention.num_key_value_groups
    keys.append(key.repeat_interleave(groups, dim=1))
    values.append(value.repeat_interleave(groups, dim=1))
    count = normed.shape[1]
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (query @ keys[0].transpose(2, 3)).masked_fill(hidden, -torch.inf)
    own = [(query * each).sum(dim=-1, keepdim=True) for each in keys[1:]]
    weights = (torch.cat([scores, *own], dim=-1).float() * attention.scaling).softmax(dim=-1)
    weights = weights.to(query.dtype)
    result = weights[..., :count] @ values[0]
    for index, each in enumerate(values[1:]):
        result = result + weights[..., count + index, None] * each
    return attention.o_proj(result.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _compute_losses(
    mtp_layer: MtpLayer, network: Qwen2ForCausalLM, ids: Tensor, weights: Tensor
) -> list[Tensor]:
    """For each token ahead, how far the predicted probabilities are from the model's own."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            rows = network.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            taught = network.lm_head(rows).float().softmax(dim=-1)
        count, losses = rows.shape[1] - _AHEAD, list[Tensor]()
        steps = predict_ahead(mtp_layer, network, rows[:, :count], ids, _AHEAD)
        for step, made in enumerate(steps, 1):
            predicted = network.lm_head(made).float().log_softmax(dim=-1)
            wanted = weights[:, step + 1 : step + 1 + count]
            each = -(taught[:, step : step + count] * predicted).sum(dim=-1)
            losses.append((each * wanted).sum() / wanted.sum())
    return losses


def train_mtp_layer(folder: Path, base: Path, plan: Plan, conversations: int) -> None:
    """Train a layer for the model in ``base``; write both into ``folder``.

    Progress goes to stderr as JSON lines: the losses of each token ahead.
    """
    torch.manual_seed(plan.seed)
    torch.use_deterministic_algorithms(True)
    network = load_network(base)
    network.requires_grad_(False)
    mtp_layer = MtpLayer(network)
    talks = select_conversations("train", conversations, plan.seed)
    pool = make_samples(load_tokenizer(base), talks)
    optimizers = make_optimizers(mtp_layer, plan)
    started = time.monotonic()
    for step, (ids, weights) in enumerate(islice(make_batches(pool, plan.seed), plan.steps)):
        set_rate(optimizers, step, plan)
        losses = _compute_losses(mtp_layer, network, ids, weights)
        total = sum((loss * _FADING**ahead for ahead, loss in enumerate(losses)), torch.zeros(()))
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(mtp_layer.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 25 == 0 or step == plan.steps - 1:
            line = {
                "step": step,
                "losses": [round(loss.item(), 3) for loss in losses],
                "seconds": round(time.monotonic() - started, 1),
            }
            print(json.dumps(line), file=sys.stderr, flush=True)
    save_mtp_layer(mtp_layer, base, folder)


def save_mtp_layer(mtp_layer: MtpLayer, base: Path, folder: Path) -> None:
    """Write the model of ``base`` with an MTP layer into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, folder / name)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    every = load_file(base / "model.safetensors")
    every |= {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in mtp_layer.tensors().items()
    }
    save_file(every, folder / "model.safetensors", metadata={"format": "pt"})
