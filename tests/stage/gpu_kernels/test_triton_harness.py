"""Tests of the harness: what it runs is right, and it tells what a device can't run."""

import torch

from tests.support.triton_device import DEVICE, needs_triton
from tests.support.triton_targets import TARGETS, compile_in_child

pytestmark = needs_triton


def test_kernels_run_here() -> None:
    from tests.support.sample_kernels import add_vectors

    one, other = torch.randn(2, 100, device=DEVICE)
    assert torch.equal(add_vectors(one, other), one + other)


def test_what_a_device_cannot_run_is_told() -> None:
    compiled = compile_in_child("tests.support.sample_kernels")
    names = ("add_kernel", "greedy_kernel", "unknown_kernel")
    problems = {
        (name, one.capability): one.problem
        for one in compiled
        for name in names
        if name in one.kernel
    }
    # Equal launches are compiled once.
    assert len(problems) == len(compiled) == len(names) * len(TARGETS)
    assert [problems["add_kernel", each] for each in TARGETS] == [""] * len(TARGETS)
    assert all("shared memory" in problems["greedy_kernel", each] for each in TARGETS if each >= 80)
    assert all("no_such_operator" in problems["unknown_kernel", each] for each in TARGETS)
