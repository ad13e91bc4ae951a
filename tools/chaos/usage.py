"""What processes use of their PC: memory and descriptors."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from tools.chaos.pc import Pc


@dataclass(frozen=True, slots=True)
class Usage:
    """Of some processes together: resident bytes, open files and sockets, how many they are."""

    rss: int
    descriptors: int
    processes: int = 1


def measure_usage(processes: Iterable[psutil.Process]) -> Usage:
    """The sum over those that live."""
    rss = descriptors = count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            rss += process.memory_info().rss
            # Handles, on Windows.
            descriptors += process.num_handles() if psutil.WINDOWS else process.num_fds()
            count += 1
    return Usage(rss, descriptors, count)


def measure_usage_by_role(pcs: Iterable[Pc]) -> dict[str, Usage]:
    """By PC and role: workers come and go, what a PC's worker takes should stay."""
    found = {}
    for pc in pcs:
        processes = pc.processes()
        for role in {pc.role(process) for process in processes}:
            of_role = [process for process in processes if pc.role(process) == role]
            found[f"{pc.name} {role}"] = measure_usage(of_role)
    return found
