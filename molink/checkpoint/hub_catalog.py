"""The catalog: short names of models on the Hugging Face hub, such as ``qwen3:8b``.

``configs/models/catalog`` has a file per family. Its ``[config]``, and that of each model, hold the
fields of ``config.json`` that determine the model's shape; parameters, size and memory follow from
them (:mod:`molink.checkpoint.described_weights`).
"""

import datetime
import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Annotated, Any

import msgspec

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.described_weights import (
    GGUF_FORMATS,
    STORAGE_CONFIGS,
    DescribedWeights,
    describe_weights,
)
from molink.checkpoint.model_task import ModelTask, TaskName
from molink.errors import UsageError

#: Separates family, tag and format in a name.
_TAG_MARK, _FORMAT_MARK = ":", "-"
#: Maximum number of names proposed for an unknown one, and how similar they must be.
_MAX_PROPOSED = 3
_MIN_SIMILARITY = 0.6
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
_Line = Annotated[str, msgspec.Meta(min_length=1, max_length=80)]


class _ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``[[models]]`` section. ``files`` maps a format to ``OWNER/NAME`` or a GGUF file in it; the
    first is the default."""

    tag: _Name
    files: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    config: dict[str, Any] = {}
    license: str = ""


class _FamilyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the catalog. ``date`` is when its names were confirmed."""

    date: datetime.date
    license: _Line
    use: _Line
    default: _Name
    config: dict[str, Any]
    models: Annotated[tuple[_ModelSection, ...], msgspec.Meta(min_length=1)]
    task: TaskName = "generate"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model in one format. ``source`` is ``OWNER/NAME`` or ``OWNER/NAME/FILE.gguf``.

    ``is_default`` marks the format of names that give none.
    """

    name: str
    family: str
    tag: str
    format: str
    source: str
    license: str
    use: str
    date: datetime.date
    task: TaskName
    fields: dict[str, Any]
    is_default: bool

    def parse_config(self) -> ModelConfig:
        """Parse the fields of the model's config that the catalog holds.

        Raises:
            ModelError: the catalog describes a model that molink does not serve.
        """
        raw = {**self.fields, **STORAGE_CONFIGS[self.format]}
        config = ModelConfig.parse_config(raw, f"{self.name} in the catalog")
        if self.format in GGUF_FORMATS:
            config = replace(config, mtp=None)  # published files lack it
        if self.task == "embed":
            return replace(config, task=ModelTask("embed"), tied_embeddings=False)
        return config

    def describe_weights(self) -> DescribedWeights:
        """Describe the stored tensors of typical layers; raises as :meth:`parse_config`."""
        return describe_weights(self.parse_config(), self.format)


@dataclass(frozen=True, slots=True)
class HubCatalog:
    """All entries, and the default tag of each family."""

    entries: tuple[CatalogEntry, ...]
    default_tags: dict[str, str]

    def find_entry(self, name: str) -> CatalogEntry | None:
        """Find the entry ``FAMILY``, ``FAMILY:TAG`` or ``FAMILY:TAG-FORMAT``; case does not matter.

        The tag ``latest`` means the default, as with Ollama.
        """
        name = name.lower().removesuffix(f"{_TAG_MARK}latest")
        if name in self.default_tags:
            name = f"{name}{_TAG_MARK}{self.default_tags[name]}"
        for entry in self.entries:
            whole = f"{entry.family}{_TAG_MARK}{entry.tag}{_FORMAT_MARK}{entry.format}"
            if name in (entry.name, whole):
                return entry
        return None

    def search_entries(self, text: str) -> list[CatalogEntry]:
        """Find entries whose name, source, use or license contain all words of ``text``."""
        words = text.lower().split()

        def matches(entry: CatalogEntry) -> bool:
            where = f"{entry.name} {entry.source} {entry.use} {entry.license}".lower()
            return all(word in where for word in words)

        return [entry for entry in self.entries if matches(entry)]

    def propose_names(self, name: str) -> list[str]:
        """Propose names close to an unknown ``name``: tags of its family, or similar names."""
        family, _, tag = name.lower().partition(_TAG_MARK)
        if family in self.default_tags:
            tags = [one.tag for one in self.entries if one.family == family and one.is_default]
            near = difflib.get_close_matches(tag, tags, _MAX_PROPOSED, 0)
            return [f"{family}{_TAG_MARK}{one}" for one in near]
        known = [*self.default_tags, *(one.name for one in self.entries if one.is_default)]
        return difflib.get_close_matches(name.lower(), known, _MAX_PROPOSED, _MIN_SIMILARITY)


@cache
def load_catalog() -> HubCatalog:
    """Load the catalog that is part of molink.

    Raises:
        UsageError: a file of it is damaged; names the file.
    """
    folder = resources.files("molink.configs") / "models" / "catalog"
    texts = {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return parse_catalog(texts)


def parse_catalog(texts: dict[str, str]) -> HubCatalog:
    """Parse the files of a catalog, by family.

    Raises:
        UsageError: one is invalid; names the family.
    """
    entries: list[CatalogEntry] = []
    defaults: dict[str, str] = {}
    for family in sorted(texts):
        where = f"the catalog's {family}.toml"
        try:
            found = msgspec.convert(tomllib.loads(texts[family]), _FamilyFile)
        except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise UsageError(f"{where}: {error}") from None
        _check_family(found, where)
        entries += _family_entries(family, found)
        defaults[family] = found.default
    return HubCatalog(tuple(entries), defaults)


def _family_entries(family: str, found: _FamilyFile) -> Iterable[CatalogEntry]:
    for model in found.models:
        short = f"{family}{_TAG_MARK}{model.tag}"
        for index, (storage, source) in enumerate(model.files.items()):
            yield CatalogEntry(
                name=f"{short}{_FORMAT_MARK}{storage}" if index else short,
                family=family,
                tag=model.tag,
                format=storage,
                source=source,
                license=model.license or found.license,
                use=found.use,
                date=found.date,
                task=found.task,
                fields={**found.config, **model.config},
                is_default=not index,
            )


def _check_family(found: _FamilyFile, where: str) -> None:
    tags = [model.tag for model in found.models]
    if len(set(tags)) < len(tags):
        raise UsageError(f"{where}: a tag occurs twice")
    if found.default not in tags:
        raise UsageError(f"{where}: the default {found.default!r} is not among the tags")
    for model in found.models:
        unknown = model.files.keys() - STORAGE_CONFIGS.keys()
        if unknown:
            known = ", ".join(STORAGE_CONFIGS)
            raise UsageError(f"{where}: unknown format {min(unknown)!r}; known are {known}")
