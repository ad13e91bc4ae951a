"""The bundled catalog, and names in it."""

import re

import pytest

from molink.checkpoint.described_weights import GGUF_FORMATS
from molink.checkpoint.families import ARCHITECTURES
from molink.checkpoint.hub_catalog import CatalogEntry, load_catalog, parse_catalog
from molink.checkpoint.model_source import is_hub_file, is_repository
from molink.errors import UsageError
from molink.gguf.family_configs import FAMILY_CONFIGS

ENTRIES = load_catalog().entries
#: Bytes of published files, as listed by the hub.
PUBLISHED = {
    "gemma3:1b": 806_058_240,
    "gemma3:4b": 2_489_757_856,
    "gpt-oss:20b-mxfp4-gguf": 12_109_566_624,
    "gpt-oss:120b-mxfp4-gguf": 63_387_346_208,
    "granite4:1b": 901_162_208,
    "granite4:3b": 1_942_564_512,
    "granite4:7b-a1b": 4_230_976_352,
    "granite4:32b-a9b": 19_476_621_984,
    "lfm2:350m": 379_214_784,
    "lfm2:1.2b": 730_893_248,
    "lfm2:2.6b": 1_563_668_704,
    "lfm2:8b-a1b": 5_044_779_712,
    "llama3.2:3b": 2_019_377_696,
    "mistral-small:24b": 14_333_908_672,
    "phi4:14b": 9_053_114_816,
    "qwen2.5:0.5b": 397_808_192,
    "qwen3:30b-a3b": 18_556_685_824,
    "qwen3-2507:4b": 2_497_280_736,
    "qwen3-coder:80b-a3b": 48_410_992_032,
    "qwen3-next:80b-a3b": 48_506_100_512,
    "qwen3.5:2b": 1_270_808_032,
    "qwen3.5:4b": 2_707_513_696,
    "qwen3.5:9b": 5_627_044_256,
    "qwen3.5:27b": 16_740_812_704,
    "qwen3.5:35b-a3b": 21_169_116_992,
    "qwen3.5:397b-a17b": 244_093_630_912,
    "seed-oss:36b": 21_762_149_024,
    "smollm2:1.7b": 1_055_609_536,
    "smollm3:3b": 1_915_305_312,
}
#: Architectures with another name in GGUF files.
GGUF_NAMES = {
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "mistral": "llama",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


def named_size(entry: CatalogEntry) -> tuple[float, float]:
    """Parameters that a tag states, and half a unit of its last digit."""
    match = re.match(r"(\d+(?:\.(\d+))?)([mbt])(?:-a\d+(?:\.\d+)?b)?\Z", entry.tag)
    assert match is not None, f"{entry.name}: the tag does not begin with a size"
    unit = UNITS[match[3]]
    return float(match[1]) * unit, 0.5 * unit / 10 ** len(match[2] or "")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_served_and_as_large_as_its_name_says(entry: CatalogEntry) -> None:
    config, weights = entry.parse_config(), entry.describe_weights()
    assert config.family in ARCHITECTURES.values()
    assert config.dtype == "bf16"
    size, rounding = named_size(entry)
    assert weights.parameters == pytest.approx(size, abs=max(0.15 * size, rounding))
    is_gguf = entry.format in GGUF_FORMATS
    assert (is_hub_file if is_gguf else is_repository)(entry.source), entry.source
    if is_gguf:
        assert GGUF_NAMES.get(config.family, config.family) in FAMILY_CONFIGS


@pytest.mark.parametrize("name", PUBLISHED)
def test_computed_sizes_are_those_of_published_files(name: str) -> None:
    entry = load_catalog().find_entry(name)
    assert entry is not None
    assert entry.describe_weights().nbytes == pytest.approx(PUBLISHED[name], rel=0.02)


def test_nothing_is_listed_twice() -> None:
    names = [entry.name for entry in ENTRIES]
    sources = [entry.source for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert len(set(sources)) == len(sources)


def test_names_are_found() -> None:
    catalog = load_catalog()
    eight = catalog.find_entry("qwen3:8b")
    assert eight is not None
    assert eight.source == "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"
    for same in ("qwen3", "qwen3:latest", "Qwen3:8B", "qwen3:8b-q4_k_m"):
        assert catalog.find_entry(same) == eight
    whole = catalog.find_entry("qwen3:8b-bf16")
    assert whole is not None
    assert (whole.source, whole.is_default) == ("Qwen/Qwen3-8B", False)
    for unknown in ("", ":", "qwen3:", "qwen3:9b", "qwen", "Qwen/Qwen3-8B", "qwen3:8b-q2_k"):
        assert catalog.find_entry(unknown) is None
    for family, tag in catalog.default_tags.items():
        found = catalog.find_entry(family)
        assert found is not None
        assert (found.family, found.tag) == (family, tag)


def test_the_nearest_names_are_proposed() -> None:
    catalog = load_catalog()
    assert "qwen3:8b" in catalog.propose_names("qwen3:9b")
    assert "qwen3" in catalog.propose_names("qwn3")
    assert len(catalog.propose_names("qwen3")) <= 3
    assert catalog.propose_names("zzzzzzzz") == []


def test_all_words_are_searched_for() -> None:
    catalog = load_catalog()
    found = catalog.search_entries("Embeddings Apache")
    assert {entry.family for entry in found} == {"qwen3-embedding"}
    assert catalog.search_entries("") == list(catalog.entries)
    assert catalog.search_entries("qwen3 gemma") == []


GOOD = """
date = 2026-11-29
license = "MIT"
use = "chat"
default = "1b"
[config]
architectures = ["LlamaForCausalLM"]
[[models]]
tag = "1b"
files = { bf16 = "owner/name" }
"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[config]", "[config", "Expected ']'"),
        ('use = "chat"', "", "missing required field `use`"),
        ('use = "chat"', 'use = "chat"\nsize = 3', "unknown field `size`"),
        ('tag = "1b"', 'tag = "1B/x"', "matching regex"),
        ('default = "1b"', 'default = "2b"', "'2b' is not among the tags"),
        ("bf16 =", "q1 =", "unknown format 'q1'; known are bf16, fp8"),
        ('{ bf16 = "owner/name" }', "{}", "length >= 1"),
        ("[[models]]", '[[models]]\ntag = "1b"\nfiles = { bf16 = "a/b" }\n[[models]]', "twice"),
    ],
)
def test_a_damaged_file_is_named(old: str, new: str, why: str) -> None:
    assert len(parse_catalog({"toy": GOOD}).entries) == 1
    with pytest.raises(UsageError) as refused:
        parse_catalog({"toy": GOOD.replace(old, new)})
    assert str(refused.value).startswith("the catalog's toy.toml: ")
    assert why in str(refused.value)
