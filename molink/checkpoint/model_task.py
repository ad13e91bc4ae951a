"""A model's task: generating text, embedding it, or scoring a document for a query.

The ``modules.json`` of sentence-transformers decides it, not the model's name. An embedding is the
last token's normed row; a score is the difference of two tokens' logits after a prompt.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from molink.checkpoint.config_fields import ConfigFields, read_bytes, read_json
from molink.errors import BrokenModel, UnsupportedModel

TaskName = Literal["generate", "embed", "rerank"]

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
SCORE_FILE = "1_LogitScore/config.json"
#: Modules that don't change the task. Embeddings are always normalized.
_NEUTRAL_MODULES = ("Transformer", "Normalize")
_LAST_TOKEN = "lasttoken"
_MODE_PREFIX = "pooling_mode_"


#: Names of files that mark a folder as an embedding model.
EMBEDDING_FILES: dict[str, Any] = {
    MODULES_FILE: [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ],
    POOLING_FILE: {f"{_MODE_PREFIX}{_LAST_TOKEN}": True},
}


@dataclass(frozen=True, slots=True)
class ModelTask:
    """What a model is made for.

    A reranker's score is the logit of ``relevant_token`` minus that of ``irrelevant_token``.
    """

    name: TaskName = "generate"
    relevant_token: int = -1
    irrelevant_token: int = -1


GENERATE = ModelTask()


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def name(self) -> str:
        """Name of the module's class, without its package."""
        return self.type.rpartition(".")[2][:80]


def read_task(folder: Path) -> ModelTask:
    """Read the task of the model in a folder.

    Raises:
        UnsupportedModel: its embedding or score is computed in another way.
        BrokenModel: a file is missing or invalid.
    """
    path = folder / MODULES_FILE
    if not path.is_file():
        return GENERATE
    try:
        modules = msgspec.json.decode(read_bytes(path), type=list[_Module])
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: {error}; fetch the file again") from error
    by_name = {module.name: module for module in modules}
    if "LogitScore" in by_name:
        return _read_score(_find_file(folder, by_name["LogitScore"], SCORE_FILE))
    if "Pooling" not in by_name:
        return GENERATE
    others = [name for name in by_name if name not in (*_NEUTRAL_MODULES, "Pooling")]
    if others:
        raise UnsupportedModel(
            f"{path}: embeddings pass through {others[0]!r}, which is not supported: molink serves "
            "embedding models whose embedding is the last token's row"
        )
    _check_pooling(_find_file(folder, by_name["Pooling"], POOLING_FILE))
    return ModelTask("embed")


def _find_file(folder: Path, module: _Module, file: str) -> Path:
    wanted = file.partition("/")[0]
    if module.path != wanted:
        raise UnsupportedModel(
            f"{folder / MODULES_FILE}: {module.name} is in {module.path[:80]!r}, not in {wanted!r}"
        )
    return folder / file


def _check_pooling(path: Path) -> None:
    config = read_json(path)
    modes = [
        name.removeprefix(_MODE_PREFIX)
        for name, value in config.items()
        if name.startswith(_MODE_PREFIX) and value
    ]
    named: Any = config.get("pooling_mode") or []
    modes += [str(mode) for mode in (named if isinstance(named, list) else [named])]
    if modes != [_LAST_TOKEN]:
        shown = " and ".join(mode[:40] for mode in modes) or "nothing"
        raise UnsupportedModel(
            f"{path}: pooling by {shown} is not supported: molink serves embedding models that "
            f"pool by {_LAST_TOKEN}, such as Qwen3-Embedding"
        )


def _read_score(path: Path) -> ModelTask:
    fields = ConfigFields(read_json(path), str(path))
    if not fields.get_integers("false_token_id"):
        raise UnsupportedModel(
            f"{path}: a score by one token's logit is not supported: molink serves rerankers that "
            "compare two tokens, such as Qwen3-Reranker"
        )
    return ModelTask(
        "rerank", fields.get_count("true_token_id", -1), fields.get_count("false_token_id", -1)
    )
