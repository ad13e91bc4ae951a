"""Sampling and stop defaults in a model's ``generation_config.json``."""

from pathlib import Path
from typing import Annotated

import msgspec

from molink.checkpoint.config_fields import read_bytes
from molink.errors import BrokenModel
from molink.wire.messages.data_plane import MAX_TEMPERATURE, RepetitionPenalty

TokenIds = int | list[int] | None


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Defaults for requests that set no value; ``None`` = not set.

    ``max_new_tokens`` caps answers without a limit.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    eos_token_id: TokenIds = None

    @property
    def says_sampling(self) -> bool:
        """Whether the model's authors set sampling parameters.

        Those that they left out are then neutral.
        """
        chosen = (self.temperature, self.top_p, self.top_k, self.min_p)
        return any(value is not None for value in chosen)

    @classmethod
    def load_folder(cls, folder: Path) -> "GenerationDefaults":
        """Read the folder's ``generation_config.json``, if there is one.

        Raises:
            BrokenModel: the file is not a JSON object, or a value has the wrong type.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            return msgspec.json.decode(read_bytes(path), type=cls)
        except (ValueError, RecursionError) as error:
            raise BrokenModel(f"{path}: {error}; fetch the file again") from error


def parse_token_ids(value: TokenIds) -> tuple[int, ...]:
    """Return a field's ids as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
