"""A model split over stages in one process, and transformers beside it."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage

BLOCK_SIZE = 8


class Ring:
    """All stages of a model, passing their rows on directly."""

    def __init__(self, folder: Path, splits: Sequence[int] = (), **options: Any) -> None:
        opened = ModelFolder.open(folder)
        bounds = [0, *splits, opened.config.layers]
        device, dtype = options.get("device", "cpu"), options.get("dtype", "f32")
        quantize, avoid = options.get("quantize", "none"), options.get("avoid", ())
        kept = options.get("kv_cache_dtype", "auto")
        host_experts = options.get("host_experts", 0)
        self.stages = [
            Stage.load_layers(
                opened,
                (first, last),
                device,
                dtype,
                quantize,
                disabled_kernels=avoid,
                kv_cache_dtype=kept,
                host_experts=host_experts,
            )
            for first, last in pairwise(bounds)
        ]
        for stage in self.stages:
            size = options.get("block_size", BLOCK_SIZE)
            stage.allocate_kv_pool(options.get("blocks", 64), size, options.get("states", 0))

    def run(
        self,
        tokens: Sequence[int] | Tensor,
        sequences: Sequence[SequenceRows],
        logit_rows: Sequence[int] | None = None,
    ) -> Tensor:
        """One forward over all stages; logits of all rows by default."""
        ids = torch.as_tensor(tokens)
        wanted = tuple(range(len(ids)) if logit_rows is None else logit_rows)
        rows = ids
        for stage in self.stages:
            given = (ids, None) if stage.is_first else (None, rows)
            # The next step may overwrite them.
            rows = stage.forward(StageInput(*given, tuple(sequences), wanted)).clone()
        return rows

    def generate(
        self, prompt: Sequence[int], count: int, blocks: Sequence[int], chunk: int = 1024
    ) -> list[int]:
        """Greedy tokens after a prompt that is prefilled in chunks."""
        tokens, start = list(prompt), 0
        while len(tokens) < len(prompt) + count:
            rows = tokens[start : start + chunk]
            logits = self.run(rows, [SequenceRows(start, len(rows), blocks)], [len(rows) - 1])
            start += len(rows)
            if start == len(tokens):
                tokens.append(int(logits[0].argmax()))
        return tokens[len(prompt) :]


class Reference:
    """The same model in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        import transformers

        named = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        kind = getattr(transformers, named)
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits ``[len(tokens), V]`` of one full forward."""
        return self.model(torch.tensor([list(tokens)])).logits[0]

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens with transformers' own cache."""
        answer = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return answer[0, len(prompt) :].tolist()


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """The flash kernel by its documentation: rows are the last of their sequences.

    It also checks what the kernel would refuse or read past.
    """
    count, width = block_table.shape
    page, kv_heads = key.shape[1:3]
    for numbers in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert numbers.dtype == torch.int32
        assert numbers.is_contiguous()
    assert cu_seq_q.shape == cu_seq_k.shape == (count + 1,)
    assert cu_seq_k.tolist() == [index * width * page for index in range(count + 1)]
    assert int(seqused_k.max()) <= max_k <= width * page
    assert int(cu_seq_q.diff().max()) <= max_q
    assert enable_gqa == (query.shape[1] != kv_heads)
    result = torch.empty(query.shape, dtype=query.dtype)
    left, right = window_size
    for index, used in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seq_q[index]), int(cu_seq_q[index + 1]))
        pages = block_table[index].long()
        keys, values = (
            part[pages].flatten(0, 1)[:used].repeat_interleave(query.shape[1] // kv_heads, dim=1)
            for part in (key, value)
        )
        own = torch.arange(used - (rows.stop - rows.start), used)[:, None]
        places = torch.arange(used)[None, :]
        hidden = torch.zeros(len(own), used, dtype=torch.bool)
        if left >= 0:
            hidden |= places < own - left
        if right >= 0:
            hidden |= places > own + right
        # What no row sees is not read.
        for part in (keys, values):
            part[hidden.all(dim=0)] = 0
        scores = torch.einsum("qhd,khd->hqk", query[rows], keys) * scale
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        result[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    return result
