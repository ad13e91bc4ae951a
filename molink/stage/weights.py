"""Loading tensors of a model folder, converted and merged, without a copy more than needed."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from molink.errors import BrokenModel
from molink.model.folder import ModelFolder
from molink.stage.linear import Projection, can_pack, make_projection


class WeightReader:
    """Reads tensors into a dtype on a device; files are mapped while the reader is open.

    Every result owns its memory, so the files may go away afterwards.
    """

    def __init__(self, folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._pack = can_pack(dtype, device)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, *names: str) -> Tensor:
        """The tensors, one below the other in their first dimension.

        Raises:
            BrokenModel: a tensor is missing or can't be read; named.
        """
        spans = [self._folder.tensors[name] for name in names]
        rows = sum(span.shape[0] for span in spans)
        merged = torch.empty((rows, *spans[0].shape[1:]), dtype=self._dtype, device=self._device)
        first = 0
        for name, span in zip(names, spans, strict=True):
            merged[first : first + span.shape[0]].copy_(self._mapped(name, span.file))
            first += span.shape[0]
        return merged

    def projection(self, names: Sequence[str], biased: bool) -> Projection:
        """Projections ``names`` (without ``.weight``) merged into one, outputs side by side."""
        weight = self.read(*(f"{name}.weight" for name in names))
        bias = self.read(*(f"{name}.bias" for name in names)) if biased else None
        return make_projection(weight, bias, self._pack)

    def _mapped(self, name: str, file: str) -> Tensor:
        path = self._folder.path / file
        try:
            if file not in self._files:
                opened = safe_open(path, framework="pt", device="cpu")
                self._files[file] = self._stack.enter_context(opened)
            tensor: Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BrokenModel(f"{path}: tensor {name} can't be read: {error}") from error
        return tensor
