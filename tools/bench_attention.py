"""Times attention over a paged pool, backend beside backend, for one layer.

    python -m tools.bench_attention --json
    python -m tools.bench_attention --dtype f32 --rows 512 --threads 1

``dense`` is SDPA over keys and values that lie in one piece: what ``gather`` would take if it had
nothing to gather. Beside them stand ``flash`` on CUDA, with pages of 256, and ``compiled`` on a
CPU; in float32 ``avx2`` is the same, compiled for one thread of a CPU that has no more than that.
Rows are decode rows, or with ``--rows`` chunks of prompts, without ``dense``. ``kv_bytes`` is what
has to be moved: keys and values once, or with gathering three times (read, written, read again)
unless the blocks happen to be consecutive.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from molink.errors import MolinkError
from molink.stage.attention.base import AttentionBackend, AttentionShape, BackendName
from molink.stage.attention.compiled import CompiledAttention, kernel_shape
from molink.stage.attention.create import create_attention
from molink.stage.batch import SequenceRows
from molink.stage.kernels.arithmetic import Float32
from molink.stage.kernels.attention_kernel import AttentionKernel
from molink.stage.kv_pool import KVPool
from molink.stage.torch_dtypes import TORCH_DTYPES

_CONTEXTS, _BATCHES = (1024, 8192), (1, 8)
_AVX2 = "+avx,+avx2,+fma"


@dataclass(frozen=True)
class Result:
    """One measurement: seconds of one layer's attention (median), bytes of KV moved for it."""

    backend: str
    context: int
    batch: int
    consecutive: bool
    seconds: float
    kv_bytes: int


@dataclass(frozen=True)
class Case:
    """``rows`` of each of ``batch`` requests with ``context`` positions, theirs included."""

    shape: AttentionShape
    context: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    consecutive: bool
    rows: int = 1

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values, once."""
        row = 2 * self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize
        return self.context * self.batch * row

    def heads(self) -> Tensor:
        """Rows ``[batch * rows, q, k and v heads, head_dim]``."""
        shape = self.shape
        size = (self.batch * self.rows, (shape.groups + 2) * shape.kv_heads, shape.head_dim)
        return torch.randn(size, dtype=self.dtype, device=self.device)

    def paged(self, name: BackendName, block_size: int) -> Result:
        """The backend called ``name``."""
        where = (block_size, self.dtype, self.device)
        return self.over_pages(name, create_attention(name, self.shape, *where), block_size)

    def over_pages(self, name: str, backend: AttentionBackend, block_size: int) -> Result:
        """A backend over a pool that is twice as large, with the blocks shuffled or in order."""
        each = -(-self.context // block_size)
        blocks = 2 * each * self.batch
        pool = KVPool(self.shape, 1, blocks, block_size, self.dtype, self.device)
        pool.zero_blocks(range(blocks))
        order = list(range(blocks)) if self.consecutive else torch.randperm(blocks).tolist()
        tables = [order[i * each : (i + 1) * each] for i in range(self.batch)]
        rows = [SequenceRows(self.context - self.rows, self.rows, table) for table in tables]
        layer = backend.prepare_layers(rows, block_size, self.dtype, self.device)
        heads = self.heads()
        times = 3 if name == "gather" and not self.consecutive else 1
        return self._result(name, lambda: layer(0, heads, pool), times)

    def dense(self) -> Result:
        """SDPA with the groups of query heads folded into the query length."""
        shape = self.shape
        size = (2, self.batch, self.context, shape.kv_heads, shape.head_dim)
        both = torch.zeros(size, dtype=self.dtype, device=self.device).transpose(2, 3)
        queries = self.heads()[:, : shape.groups * shape.kv_heads]
        folded = queries.view(self.batch, shape.kv_heads, shape.groups, shape.head_dim)
        keys, values = both
        return self._result("dense", lambda: scaled_dot_product_attention(folded, keys, values), 1)

    def _result(self, name: str, work: Callable[[], Tensor], times: int) -> Result:
        taken, moved = _median(work, self.device), times * self.kv_bytes
        return Result(name, self.context, self.batch, self.consecutive, taken, moved)


def _median(work: Callable[[], Tensor], device: torch.device, budget: float = 0.5) -> float:
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 4 or (len(taken) < 50 and time.perf_counter() - begin < budget):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


@torch.inference_mode()
def measure(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, rows: int
) -> list[Result]:
    """All cases; backends that don't work on the device are left out."""
    found = []
    narrow = None
    if device.type == "cpu" and dtype is torch.float32:
        code = AttentionKernel(kernel_shape(shape, 16), Float32(), features=_AVX2)
        narrow = CompiledAttention(shape, code)
    for context in _CONTEXTS:
        for batch in _BATCHES:
            for consecutive in (False, True):
                case = Case(shape, context, batch, dtype, device, consecutive, rows)
                if rows == 1:
                    found.append(case.dense())
                found.append(case.paged("gather", 16))
                if narrow is not None:
                    found.append(case.over_pages("avx2", narrow, 16))
                for name, block_size in (("flash", 256), ("compiled", 16)):
                    with suppress(MolinkError):
                        found.append(case.paged(name, block_size))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="bf16")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4, help="query heads per key-value head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=1, help="of each request; at most 1024")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    head = options.head_dim
    shape = AttentionShape(options.kv_heads, options.groups, head, head**-0.5, (0,))
    found = measure(shape, TORCH_DTYPES[options.dtype], torch.device(options.device), options.rows)
    if options.json:
        print(json.dumps([asdict(result) for result in found], indent=1))
        return
    for one in found:
        where = "in order" if one.consecutive else "shuffled"
        print(
            f"{one.backend:8} {one.context:6} x {one.batch} {where}: {1e3 * one.seconds:8.3f} ms,"
            f" {one.kv_bytes >> 20:6} MiB of KV moved"
        )


if __name__ == "__main__":
    main()
