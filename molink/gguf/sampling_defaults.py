"""How the authors of a GGUF file want their model sampled: ``general.sampling.*``."""

from molink.gguf.metadata import GgufMetadata
from molink.wire.messages.data_plane import (
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)

#: Names of a ``generation_config.json``: the key of the file, and what the value is bounded to.
#: What llama.cpp takes for "off" (a top_k of -1, say) is so within these bounds too.
_SAMPLING_KEYS = {
    "temperature": ("general.sampling.temp", 0.0, MAX_TEMPERATURE),
    "top_p": ("general.sampling.top_p", 0.0, 1.0),
    "top_k": ("general.sampling.top_k", 0, 2**31 - 1),
    "min_p": ("general.sampling.min_p", 0.0, 1.0),
    "repetition_penalty": (
        "general.sampling.penalty_repeat",
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
    ),
}


def read_sampling_defaults(metadata: GgufMetadata) -> dict[str, float]:
    """What the file says, by the names of a ``generation_config.json``; mostly nothing.

    Raises:
        BrokenModel: a value is no finite number; its key is named.
    """
    found: dict[str, float] = {}
    for name, (key, least, most) in _SAMPLING_KEYS.items():
        if key in metadata:
            value = min(max(metadata.get_number(key), least), most)
            found[name] = int(value) if name == "top_k" else value
    return found
