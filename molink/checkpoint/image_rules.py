"""Reads how a model prepares images from the files of its image processor."""

from dataclasses import replace
from pathlib import Path

from molink.checkpoint.config_fields import ConfigFields, read_json
from molink.checkpoint.vision import MAX_SIDE, ImageRules, VisionConfig
from molink.errors import BrokenModel, UnsupportedModel

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
#: Maximum pixels of an image, even if the processor allows more: 5349 tokens of 28 x 28.
_MOST_PIXELS = 4 << 20
#: Maximum tokens of an image of Gemma 4.
_MOST_CELLS = 1120


def read_image_rules(folder: Path, vision: VisionConfig) -> VisionConfig | None:
    """Return the tower with the image rules of its folder; ``None`` if the folder has none.

    Raises:
        BrokenModel: the file is invalid, or contradicts the tower.
        UnsupportedModel: it needs a feature that is not implemented.
    """
    for name in (PREPROCESSOR_FILE, PROCESSOR_FILE):
        path = folder / name
        if path.is_file():
            fields = ConfigFields(read_json(path), str(path))
            inner = fields.get_object("image_processor")
            if name == PREPROCESSOR_FILE or inner:
                fields = ConfigFields(inner, str(path)) if inner else fields
                return replace(vision, rules=_parse_rules(fields, vision))
    return None


def _parse_rules(fields: ConfigFields, vision: VisionConfig) -> ImageRules:
    rules, where = vision.rules, fields.where
    if rules.layout == "budget":
        return _parse_budget(fields, vision)
    for name in ("do_rescale", "do_normalize", "do_resize"):
        if not fields.get_boolean(name, True):
            raise UnsupportedModel(f"{where}: {name} false is not supported")
    if abs(fields.get_positive("rescale_factor", 1 / 255) - 1 / 255) > 1e-6:
        raise UnsupportedModel(f"{where}: a rescale_factor other than 1/255 is not supported")
    resample = fields.get_count("resample", rules.resample, 5)
    mean, std = (_parse_channels(fields, f"image_{name}") for name in ("mean", "std"))
    made = replace(rules, resample=resample, mean=mean or rules.mean, std=std or rules.std)
    if any(number <= 0 for number in made.std):
        raise BrokenModel(f"{where}: image_std must be positive")
    size = ConfigFields(fields.get_object("size"), f"{where}: size")
    if rules.layout == "cells":
        least = size.get_integer(
            "shortest_edge", fields.get_integer("min_pixels", rules.least_pixels)
        )
        most = size.get_integer("longest_edge", fields.get_integer("max_pixels", rules.most_pixels))
        most = min(most, _MOST_PIXELS)
        if least > most or most < vision.cell_pixels**2:
            raise BrokenModel(f"{where}: images of {least} to {most} pixels")
        return replace(made, least_pixels=least, most_pixels=most)
    longest = size.get_integer("longest_edge", max(rules.longest, rules.size), MAX_SIDE)
    if rules.layout == "lines":
        return replace(made, size=longest // vision.cell_pixels * vision.cell_pixels)
    side = size.get_integer("height", rules.size, MAX_SIDE)
    if rules.layout == "tiles":
        tile = ConfigFields(fields.get_object("max_image_size"), f"{where}: max_image_size")
        side = tile.get_integer("longest_edge", rules.size, MAX_SIDE)
        tiled = fields.get_boolean("do_image_splitting", True)
        made = replace(made, longest=longest * tiled)
    if side != rules.size:
        raise BrokenModel(f"{where}: images of {side} pixels a side, in config.json {rules.size}")
    return made


def _parse_budget(fields: ConfigFields, vision: VisionConfig) -> ImageRules:
    """Parse Gemma 4's rules; its tower scales pixels itself."""
    for name, only in (("do_rescale", True), ("do_normalize", False), ("do_resize", True)):
        if fields.get_boolean(name, only) != only:
            raise UnsupportedModel(f"{fields.where}: {name} {not only} is not supported")
    side, patch = fields.get_integer("pooling_kernel_size", 3), fields.get_integer("patch_size", 16)
    if side * patch != vision.cell_pixels:
        raise BrokenModel(
            f"{fields.where}: cells of {side * patch} pixels, in config.json {vision.cell_pixels}"
        )
    cells = fields.get_integer("max_soft_tokens", 280, _MOST_CELLS)
    resample = fields.get_count("resample", vision.rules.resample, 5)
    return replace(vision.rules, most_pixels=cells * vision.cell_pixels**2, resample=resample)


def _parse_channels(fields: ConfigFields, name: str) -> tuple[float, float, float] | None:
    if fields.get_value(name) is None:
        return None
    numbers = fields.get_numbers(name)
    if len(numbers) != 3:
        raise BrokenModel(f"{fields.where}: {name} must have three numbers")
    return numbers[0], numbers[1], numbers[2]
