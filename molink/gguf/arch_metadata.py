"""Reads a GGUF file's metadata under its architecture's prefix."""

from collections.abc import Callable

from molink.errors import BrokenModel, UnsupportedModel
from molink.gguf.gguf_file import GgufFile, GgufTensor

_MAX_LAYERS = 4096
_MAX_FACTORS = 4096
#: Reads a small tensor of numbers.
ReadTensor = Callable[[GgufTensor], list[float]]


class ArchMetadata:
    """Metadata under the architecture's prefix.

    The file's ``block_count`` includes ``draft_layers`` for multi-token prediction; ``layers``
    doesn't.
    """

    def __init__(self, file: GgufFile, name: str, read: ReadTensor) -> None:
        """Raises :class:`BrokenModel` if the file has no layers."""
        self.file, self.metadata, self.read = file, file.metadata, read
        self.name = name
        self._blocks = file.metadata.get_integer(self.full_key("block_count"), maximum=_MAX_LAYERS)
        self.draft_layers = self.get_count("nextn_predict_layers")
        self.layers = self._blocks - self.draft_layers
        if self.layers < 1:
            raise BrokenModel(
                f"{self.metadata.where}: metadata {self.full_key('nextn_predict_layers')} "
                f"{self.draft_layers} leave none of {self._blocks} layers"
            )

    @property
    def is_latent(self) -> bool:
        """Whether the model has latent attention."""
        return self.has_key("attention.kv_lora_rank")

    @property
    def has_query_bias(self) -> bool:
        """Whether query projections have biases."""
        return self.has_tensors(".attn_q.bias")

    def has_tensors(self, ending: str) -> bool:
        """Whether the file has tensors whose names end so."""
        return any(name.endswith(ending) for name in self.file.tensors)

    def full_key(self, key: str) -> str:
        return f"{self.name}.{key}"

    def has_key(self, key: str) -> bool:
        return self.full_key(key) in self.metadata

    def get_integer(self, key: str, default: int | None = None) -> int:
        return self.metadata.get_integer(self.full_key(key), default)

    def get_count(self, key: str, default: int = 0) -> int:
        """Return a number from 0."""
        return default if not self.has_key(key) else self.metadata.get_count(self.full_key(key))

    def get_boolean(self, key: str, default: bool) -> bool:
        return self.metadata.get_boolean(self.full_key(key), default)

    def get_number(self, key: str, default: float | None = None) -> float:
        return self.metadata.get_number(self.full_key(key), default)

    def list_numbers(self, key: str) -> list[int]:
        """Return a number for each layer; 0 where it doesn't apply."""
        return self.metadata.get_integers(self.full_key(key), self._blocks)[: self.layers]

    def get_uniform(self, key: str, *, ignores_zeros: bool = False) -> int:
        """Return a number that is equal for all layers, or for those that have it."""
        found = set(self.metadata.get_integers(self.full_key(key), self._blocks))
        if ignores_zeros:
            found.discard(0)
        if len(found) != 1 or 0 in found:
            raise UnsupportedModel(
                f"{self.metadata.where}: {self.full_key(key)} differs between layers, which is not "
                "supported"
            )
        return found.pop()

    def read_factors(self, name: str) -> list[float]:
        """Read the numbers of a small tensor."""
        tensor = self.file.tensors[name]
        if (
            len(tensor.shape) != 1
            or tensor.shape[0] > _MAX_FACTORS
            or tensor.ggml_type.name != "f32"
        ):
            raise BrokenModel(f"{self.file.path}: tensor {name} is not a short list of f32 numbers")
        return self.read(tensor)
