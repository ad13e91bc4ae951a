"""A correct kernel and several faulty ones, for tests of the harness."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_kernel(one, other, total, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(one + at, mask=inside) + tl.load(other + at, mask=inside)
    tl.store(total + at, found, mask=inside)


@triton.jit
def greedy_kernel(one, other, total, SIZE, DEPTH: tl.constexpr):
    """Twelve pairs of tiles under way at once fit no device's shared memory."""
    few, many = tl.arange(0, 16), tl.arange(0, DEPTH)
    found = tl.zeros((16, 16), tl.float32)
    for begin in range(0, SIZE, DEPTH):
        left = tl.load(one + few[:, None] * SIZE + begin + many[None])
        right = tl.load(other + few[None] * SIZE + begin + many[:, None])
        found = tl.dot(left, right, found)
    tl.store(total + few[:, None] * 16 + few[None], found)


@triton.jit
def unknown_kernel(one):
    tl.store(one, tl.no_such_operator(one))


def add_vectors(one: Tensor, other: Tensor) -> Tensor:
    total = torch.empty_like(one)
    add_kernel[(triton.cdiv(len(one), 64),)](one, other, total, len(one), BLOCK=64)
    return total


def multiply_rows(one: Tensor, other: Tensor) -> Tensor:
    total = one.new_empty(16, 16, dtype=torch.float32)
    greedy_kernel[(1,)](one, other, total, one.shape[1], DEPTH=512, num_stages=12)
    return total


LAUNCHES = [
    lambda: add_vectors(torch.ones(100), torch.ones(100)),
    lambda: add_vectors(torch.zeros(100), torch.ones(100)),
    lambda: multiply_rows(
        torch.ones(16, 8192, dtype=torch.float16), torch.ones(16, 8192, dtype=torch.float16)
    ),
    lambda: unknown_kernel[(1,)](torch.ones(1)),
]
