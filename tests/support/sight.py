"""Small models that see, as their released folders are, and their inputs in transformers.

Their towers have a few patches, so an image has a few tokens.
"""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.vision import VisionConfig
from molink.facts.images import FIRST_IMAGE_ID, ImageInput
from molink.images.cut import cut_image
from molink.images.prompt import encode_prompt
from molink.stage.batch import ImageRows, SequenceRows, StageInput
from molink.text.tokenizer import Tokenizer
from tests.support.models import MakeModel
from tests.support.stage import BLOCK_SIZE, Reference, Ring

#: Tokens of images; the first stands for their rows.
TOKENS: dict[str, tuple[str, ...]] = {
    "smolvlm": (
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{line}_col_{column}>" for line in (1, 2) for column in (1, 2)),
    ),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "gemma4": ("<|image|>", "<|image>", "<image|>"),
    "gemma4_unified": ("<|image|>", "<|image>", "<image|>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "qwen3_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "qwen3_vl_moe": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "qwen3_5": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
IMAGE_ID = 259
_FIELDS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "vision_config": {"image_size": 32, "patch_size": 8, "num_hidden_layers": 2},
        "outer_config": {"image_token_id": IMAGE_ID, "scale_factor": 2},
    },
    "mistral3": {
        "vision_config": {"image_size": 64, "patch_size": 8, "num_hidden_layers": 2},
        "outer_config": {"image_token_index": IMAGE_ID, "multimodal_projector_bias": True},
    },
    "gemma3": {
        "vision_config": {"image_size": 32, "patch_size": 4, "num_hidden_layers": 2},
        "outer_config": {"image_token_index": IMAGE_ID, "mm_tokens_per_image": 16},
    },
}
_FIELDS["gemma4"] = {
    "vision_config": {
        "patch_size": 4,
        "num_hidden_layers": 2,
        "pooling_kernel_size": 2,
        "standardize": True,
    },
    "outer_config": {
        "image_token_id": IMAGE_ID,
        "boi_token_id": IMAGE_ID + 1,
        "eoi_token_id": IMAGE_ID + 2,
        # Tokens of no prompt, as the small vocabulary lacks the released models'.
        "video_token_id": 300,
        "audio_token_id": 301,
        "boa_token_id": 302,
        "eoa_token_index": 303,
    },
}
_FIELDS["gemma4_unified"] = {
    "vision_config": {"patch_size": 4, "pooling_kernel_size": 2},
    "outer_config": _FIELDS["gemma4"]["outer_config"],
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE_ID,
    "vision_start_token_id": IMAGE_ID + 1,
    "vision_end_token_id": IMAGE_ID + 2,
    "video_token_id": 300,
}
_FIELDS["qwen2_5_vl"] = {
    "vision_config": {
        "patch_size": 4,
        "depth": 3,
        "num_heads": 2,
        "hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "outer_config": _QWEN_TOKENS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
    },
}
_FIELDS["qwen3_vl"] = {
    "num_hidden_layers": 4,
    "vision_config": {
        "patch_size": 4,
        "num_hidden_layers": 3,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
    "outer_config": _QWEN_TOKENS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_FIELDS["qwen3_vl_moe"] = _FIELDS["qwen3_vl"]
_FIELDS["qwen3_5"] = {
    "vision_config": {
        "patch_size": 4,
        "num_hidden_layers": 2,
        "num_position_embeddings": 36,
    },
    "outer_config": _QWEN_TOKENS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
_BUDGET = {
    "max_soft_tokens": 12,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "do_normalize": False,
    "image_mean": [0.0] * 3,
    "image_std": [1.0] * 3,
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "smolvlm": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    "mistral3": {"size": {"longest_edge": 64}, "image_mean": [0.4, 0.5, 0.6]},
    "gemma3": {"size": {"height": 32, "width": 32}, "resample": 2},
    "gemma4": _BUDGET,
    "gemma4_unified": _BUDGET,
    "qwen2_5_vl": {"min_pixels": 16 * 16, "max_pixels": 40 * 40},
    "qwen3_vl": {"size": {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}},
    "qwen3_vl_moe": {"size": {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}},
    "qwen3_5": {"size": {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}},
}
#: A prompt that shows two images.
PROMPT_TEXT = "What is the difference between @ and @, please?"
_TEMPLATE = (
    "{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n"
    "{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}%s"
    "{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


def make_seeing(make_model: MakeModel, folder: Path, family: str, **fields: Any) -> Path:
    """Write a small model that sees into ``folder``."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    make_model(folder, family, **_FIELDS[family], **fields)
    tokenizer = Backend.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in TOKENS[family]])
    tokenizer.save(str(folder / "tokenizer.json"))
    vision = ModelConfig.parse_config(
        json.loads((folder / "config.json").read_text(encoding="utf-8")), family
    ).vision
    assert vision is not None
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["chat_template"] = _TEMPLATE % vision.rules.placeholder
    path.write_text(json.dumps(settings), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[family]))
    return folder


def make_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth picture of no meaning."""
    noise = torch.randint(0, 256, (3, 3, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy()).resize(
        (width, height), Image.Resampling.BICUBIC
    )


def encode_picture(picture: Image.Image, kind: str = "PNG") -> str:
    """Base64 of a picture's file."""
    file = io.BytesIO()
    picture.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def cell_patches(tile: Tensor, vision: VisionConfig) -> Tensor:
    """Patches of ``tile`` (``[3, height, width]``) cell by cell, each twice, as Qwen's are."""
    side, patch = vision.connector.side, vision.patch_size
    lines, columns = tile.shape[1] // patch, tile.shape[2] // patch
    split = tile.view(3, lines // side, side, patch, columns // side, side, patch)
    cells = split.permute(1, 4, 2, 5, 0, 3, 6).reshape(lines * columns, 3, 1, -1)
    return cells.expand(-1, -1, vision.frames, -1).flatten(1)


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt with images: ids as molink has them, and what transformers gets."""

    ids: list[int]
    images: tuple[ImageInput, ...]
    vision: VisionConfig

    @classmethod
    def from_text(cls, folder: Path, text: str, pictures: Sequence[Image.Image]) -> "SeenPrompt":
        """Show ``pictures`` where ``text`` has ``@``."""
        vision = ModelConfig.load_folder(folder).vision
        assert vision is not None
        tokenizer = Tokenizer.open(folder)
        cuts = [cut_image(picture, vision) for picture in pictures]
        shown = text.replace("@", vision.rules.placeholder)
        ids, images = encode_prompt(
            shown, cuts, vision, IMAGE_ID, lambda text: tokenizer.encode(text, special=False)
        )
        return cls(ids, images, vision)

    @property
    def reference_ids(self) -> list[int]:
        """Its ids for transformers."""
        return [IMAGE_ID if token >= FIRST_IMAGE_ID else token for token in self.ids]

    @property
    def reference_inputs(self) -> dict[str, Tensor]:
        """The inputs of transformers beside ids."""
        rules, tiles = self.vision.rules, []
        mean, std = (torch.tensor(each) for each in (rules.mean, rules.std))
        for image in self.images:
            shape = image.span.height, image.span.width, 3
            pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(shape)
            tiles.append(((pixels / 255 - mean) / std).permute(2, 0, 1))
        if rules.layout == "cells":
            return self._patches(tiles)
        if rules.layout == "budget":
            return self._flat_patches(tiles)
        sizes = torch.tensor([[image.span.height, image.span.width] for image in self.images])
        if rules.layout == "tiles":
            return {"pixel_values": torch.stack(tiles)[None]}
        if rules.layout == "square":
            seen = torch.tensor([[token >= FIRST_IMAGE_ID for token in self.ids]])
            return {"pixel_values": torch.stack(tiles), "token_type_ids": seen.long()}
        height, width = sizes.max(dim=0).values.tolist()
        padded = torch.zeros(len(tiles), 3, height, width)
        for one, tile in zip(padded, tiles, strict=True):
            one[:, : tile.shape[1], : tile.shape[2]] = tile
        return {"pixel_values": padded, "image_sizes": sizes}

    def _flat_patches(self, tiles: Sequence[Tensor]) -> dict[str, Tensor]:
        """The inputs of Gemma 4, whose pixels are not scaled."""
        rules = self.vision.rules
        patch, most = self.vision.patch_size, max(tile[0].numel() for tile in tiles)
        pixels = torch.zeros(len(tiles), most // patch**2, 3 * patch**2)
        places = torch.full((*pixels.shape[:2], 2), -1)
        for own, where, tile in zip(pixels, places, tiles, strict=True):
            lines, columns = tile.shape[1] // patch, tile.shape[2] // patch
            split = tile.view(3, lines, patch, columns, patch).permute(1, 3, 2, 4, 0)
            own[: lines * columns] = (
                split.reshape(lines * columns, -1) * rules.std[0] + rules.mean[0]
            )
            line, column = torch.meshgrid(torch.arange(lines), torch.arange(columns), indexing="ij")
            where[: lines * columns] = torch.stack((column, line), dim=-1).flatten(0, 1)
        seen = torch.tensor([[token >= FIRST_IMAGE_ID for token in self.ids]])
        return {
            "pixel_values": pixels,
            "image_position_ids": places,
            "mm_token_type_ids": seen.long(),
        }

    def _patches(self, tiles: Sequence[Tensor]) -> dict[str, Tensor]:
        """The inputs of a Qwen."""
        patch = self.vision.patch_size
        patches = [cell_patches(tile, self.vision) for tile in tiles]
        grids = [[1, tile.shape[1] // patch, tile.shape[2] // patch] for tile in tiles]
        seen = torch.tensor([[token >= FIRST_IMAGE_ID for token in self.ids]])
        return {
            "pixel_values": torch.cat(patches),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": seen.long(),
        }


@torch.inference_mode()
def answer_reference(
    folder: Path, prompt: SeenPrompt, count: int, eos: int | None = None
) -> list[int]:
    """The greedy tokens of transformers; ``count`` of them unless one is ``eos``."""
    ids = torch.tensor([prompt.reference_ids])
    answer = Reference(folder).model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **prompt.reference_inputs,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    tokens: list[int] = answer[0, ids.shape[1] :].tolist()
    return tokens


class SeenModel:
    """A model that sees, a prompt with two images, and transformers' answer to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Fewest layers of the first stage.
        self.first = ModelConfig.load_folder(folder).first_layers
        pictures = [make_picture(40, 24, 1), make_picture(20, 50, 2)]
        self.prompt = SeenPrompt.from_text(folder, PROMPT_TEXT, pictures)
        self.blocks = list(range(1, -(-(len(self.prompt.ids) + 32) // BLOCK_SIZE) + 1))
        self.logits = self._compute_logits()
        self.answer = answer_reference(folder, self.prompt, 32)

    @torch.inference_mode()
    def _compute_logits(self) -> Tensor:
        model, prompt = Reference(self.folder).model, self.prompt
        ids, inputs = torch.tensor([prompt.reference_ids]), prompt.reference_inputs
        if prompt.vision.rules.layout == "budget":
            # By itself, Gemma 4 12B's forward has other masks in transformers than its generate.
            embedded = torch.empty(*ids.shape, model.config.text_config.hidden_size)
            masks = model.create_masks_for_generate(
                model.config, embedded, None, None, None, inputs["mm_token_type_ids"]
            )
            inputs["attention_mask"] = masks
        logits: Tensor = model(ids, **inputs).logits[0]
        return logits


class SeeingRing(Ring):
    """A ring whose first stage sees."""

    def run_prompt(
        self, prompt: SeenPrompt, blocks: Sequence[int], chunk: int = 1024, first: int = 0
    ) -> Tensor:
        """Logits of a prompt's rows from ``first`` on, computed in chunks."""
        found = []
        rows = [self.encode(image) for image in prompt.images]
        for start, end in self._cut_chunks(prompt, first, chunk):
            indices, parts = [], []
            for image, encoded in zip(prompt.images, rows, strict=True):
                for position in range(start, end):
                    row = image.span.row_at(position)
                    if row is not None:
                        indices.append(position - start)
                        parts.append(encoded[row])
            tokens = torch.tensor(prompt.ids[start:end])
            tokens = torch.where(tokens < FIRST_IMAGE_ID, tokens, 0)
            seen = ImageRows(indices, torch.stack(parts)) if indices else None
            sequence = SequenceRows(
                start, end - start, blocks, images=tuple(image.span for image in prompt.images)
            )
            hidden: Tensor | None = None
            for stage in self.stages:
                own = (tokens, None) if stage.is_first else (None, hidden)
                wanted = tuple(range(end - start))
                given = StageInput(*own, (sequence,), wanted, seen if stage.is_first else None)
                hidden = stage.forward(given).clone()
            assert hidden is not None
            found.append(hidden)
        return torch.cat(found)

    def encode(self, image: ImageInput) -> Tensor:
        """Rows of an image."""
        shape = image.span.height, image.span.width, 3
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(shape)
        return self.stages[0].encode_image(pixels)

    def _cut_chunks(self, prompt: SeenPrompt, first: int, chunk: int) -> list[tuple[int, int]]:
        """Chunks of ``chunk`` rows; longer where an image can't be cut."""
        whole = self.stages[0].config.sees_whole_images
        spans = [image.span for image in prompt.images] if whole else []
        cuts, start = [], first
        while start < len(prompt.ids):
            end = min(start + chunk, len(prompt.ids))
            end = next((one.end for one in spans if one.start < end < one.end), end)
            cuts.append((start, end))
            start = end
        return cuts

    def decode(
        self, prompt: SeenPrompt, logits: Tensor, count: int, blocks: Sequence[int]
    ) -> list[int]:
        """Greedy tokens after a prompt whose last logits are ``logits``."""
        tokens = [int(logits[-1].argmax())]
        spans = tuple(image.span for image in prompt.images)
        while len(tokens) < count:
            start = len(prompt.ids) + len(tokens) - 1
            row = SequenceRows(start, 1, blocks, images=spans)
            tokens.append(int(self.run(tokens[-1:], [row])[0].argmax()))
        return tokens
