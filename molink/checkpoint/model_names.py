"""Names of models, without the imports that reading a model needs."""

from importlib.resources import files
from pathlib import Path

from molink.errors import ModelNotFound

#: The bundled model, and the default.
DEMO_MODEL_NAME = "molink-demo"
#: A small real model that commands fetch by this name.
SMALL_MODEL_NAME = "smollm2"
GGUF_SUFFIX = ".gguf"


def short_name(repository: str) -> str:
    """Local name of a hub model."""
    name = repository.rpartition("/")[2]
    if not name.lower().endswith(GGUF_SUFFIX):
        return name
    from molink.gguf.gguf_file import model_name

    return model_name(name)


def find_demo_folder() -> Path:
    """Return the folder of the bundled model.

    Raises:
        ModelNotFound: this installation lacks it.
    """
    path = Path(str(files("molink"))) / "data" / "demo_model"
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"the bundled model is not in {path}; reinstall molink")
    return path
