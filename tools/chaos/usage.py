"""Memory and descriptors of processes."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from tools.chaos.pc import Pc


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident bytes, descriptors and number of some processes."""

    rss: int
    descriptors: int
    processes: int = 1


def measure_usage(processes: Iterable[psutil.Process]) -> Usage:
    """Sum over live processes."""
    rss = descriptors = count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            rss += process.memory_info().rss
            # Handles, on Windows.
            descriptors += process.num_handles() if psutil.WINDOWS else process.num_fds()
            count += 1
    return Usage(rss, descriptors, count)


def measure_usage_by_role(pcs: Iterable[Pc]) -> dict[str, Usage]:
    """Usage by PC and role, since workers are replaced."""
    found = {}
    for pc in pcs:
        processes = pc.processes()
        for role in {pc.role(process) for process in processes}:
            of_role = [process for process in processes if pc.role(process) == role]
            found[f"{pc.name} {role}"] = measure_usage(of_role)
    return found
