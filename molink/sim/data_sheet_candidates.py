"""PCs for placement, from the data sheets of their devices."""

from molink.facts.memory_plan import MARGIN_DIVISOR
from molink.sim.profiles import load_device
from molink.sim.roofline import memory_for_stages
from molink.swarm.placement.placement import Candidate


def make_candidate(peer: str, device: str) -> Candidate:
    """A PC with that device, as its peer would report it."""
    profile = load_device(device)
    return Candidate(
        peer,
        f"{device} ({peer})",
        # The profile's share includes the margin.
        memory=max(0, int(memory_for_stages(profile) * MARGIN_DIVISOR / (MARGIN_DIVISOR - 1))),
        read_rate=profile.memory_gbs * 1e9 * profile.memory_efficiency,
        step_overhead=profile.step_ms / 1000,
        cuda=profile.capability > 0,
        blocks=profile.keeps_blocks,
        reads_pages=profile.has_triton,
    )
