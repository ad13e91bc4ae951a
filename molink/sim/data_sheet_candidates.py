"""Describes PCs for placement by the data sheets of their devices."""

from typing import get_args

from molink.facts.device import ExpertHost
from molink.facts.dtypes import NarrowDType
from molink.facts.memory_plan import MARGIN_DIVISOR
from molink.sim.profiles import load_device
from molink.sim.roofline import memory_for_stages
from molink.swarm.placement.placement import Candidate

#: The CPU that is assumed for a PC with a graphics card.
USUAL_CPU = "cpu-8core"


def make_candidate(peer: str, device: str, expert_memory: int = 0) -> Candidate:
    """Describe a PC as its peer would report it.

    ``expert_memory`` is the bytes of RAM for experts.
    """
    profile = load_device(device)
    return Candidate(
        peer,
        f"{device} ({peer})",
        # The profile's share of memory already includes the margin.
        memory=max(0, int(memory_for_stages(profile) * MARGIN_DIVISOR / (MARGIN_DIVISOR - 1))),
        read_rate=profile.memory_gbs * 1e9 * profile.memory_efficiency,
        step_overhead=profile.step_ms / 1000,
        cuda=profile.capability > 0,
        blocks=profile.keeps_blocks,
        reads_pages=profile.has_triton,
        expert_host=_make_expert_host(expert_memory) if expert_memory else None,
    )


def _make_expert_host(memory: int) -> ExpertHost:
    cpu = load_device(USUAL_CPU)
    return ExpertHost(
        memory=memory,
        read_rate=cpu.memory_gbs * 1e9 * cpu.memory_efficiency,
        bf16=False,
        narrow_dtypes=get_args(NarrowDType),
        has_block_kernels=cpu.blocks,
    )
