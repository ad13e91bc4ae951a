"""A GGUF file with its own chat template, served by PCs that fetch their layers from another."""

import threading
from pathlib import Path

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from tests.support.gguf_models import Kind, write_gguf
from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.two_peers import answer_as_one_stage_does


def test_two_peers_answer_as_one_stage_does(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel
) -> None:
    """The model comes in parts."""
    folder = make_model(tmp_path / "model", "llama", 3)
    first = write_gguf(folder, tmp_path / "t.gguf", Kind.Q4_0, part=16)
    made = import_gguf(first, tmp_path / "here", NullCounter(), threading.Event())
    assert answer_as_one_stage_does(tmp_path / "home", tools, first, made) == "t"
