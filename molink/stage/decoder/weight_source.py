"""Sources of weights, and the operators that use them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.model import Quantize
from molink.stage.decoder.operators import RowOperators, create_operators
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class OpenedWeights:
    """An open reader, and operators for its device and dtype."""

    reader: WeightReader
    operators: RowOperators


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A checked model folder whose weights are loaded to ``device`` for computation in ``dtype``.

    ``quantize`` and ``disabled_kernels`` are as in :meth:`molink.stage.stage.Stage.load_layers`.
    """

    folder: ModelFolder
    device: torch.device
    dtype: torch.dtype
    quantize: Quantize
    disabled_kernels: Collection[str]

    @contextmanager
    def open_weights(self) -> Iterator[OpenedWeights]:
        """Map the files while weights are being read.

        Raises:
            UsageError: the checkpoint is quantized differently.
        """
        config, avoided = self.folder.config, self.disabled_kernels
        operators = create_operators(config, self.dtype, self.device, avoided)
        with WeightReader(self.folder, self.dtype, self.device, self.quantize, avoided) as reader:
            yield OpenedWeights(reader, operators)
