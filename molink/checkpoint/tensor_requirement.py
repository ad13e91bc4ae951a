"""What a tensor has to be in a file of a model."""

from dataclasses import dataclass

#: Element types of tensors that aren't quantized.
FLOAT_DTYPES = ("F32", "BF16", "F16")
#: Bytes of the JSON object beside an nf4 weight; those seen have about 150.
MAX_STATE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorRequirement:
    """What a tensor has to be in a file; an extent of -1 may be anything up to MAX_STATE_BYTES."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def accepts_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether ``shape`` is as demanded."""
        return len(shape) == len(self.shape) and all(
            found == wanted if wanted >= 0 else 0 < found <= MAX_STATE_BYTES
            for found, wanted in zip(shape, self.shape, strict=True)
        )
