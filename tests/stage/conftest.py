"""Fixtures of the tests of stages."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.support.stage import Reference, Ring, varlen_attn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The machine is shared with other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_ring() -> type[Ring]:
    """``make_ring(folder, splits=(2, 3), dtype="f32", device="cpu", blocks=64) -> Ring``."""
    return Ring


@pytest.fixture
def make_reference() -> type[Reference]:
    """``make_reference(folder) -> Reference``."""
    return Reference


@pytest.fixture
def random_tokens() -> Callable[..., list[int]]:
    """``random_tokens(count, seed=0)``."""

    def make(count: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (count,), generator=generator).tolist()

    return make


@pytest.fixture(scope="session")
def paged() -> Callable[..., Tensor]:
    """A stand-in for ``torch.nn.attention.varlen.varlen_attn`` that runs on a CPU."""
    return varlen_attn
