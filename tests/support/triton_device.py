"""Where tests of GPU kernels run: on a GPU if there is one, else in Triton's interpreter.

``tests/conftest.py`` chooses the interpreter before anything imports Triton.
"""

import pytest
import torch

from molink.stage.gpu_kernels.triton_support import find_triton_problem, is_interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

_problem = find_triton_problem()
if not _problem and DEVICE.type == "cpu" and not is_interpreted():
    _problem = "torch sees no GPU, and the PC's driver rules out the interpreter"

#: For modules whose tests launch kernels.
needs_triton = pytest.mark.skipif(bool(_problem), reason=f"no Triton: {_problem}")
