"""The host memory of a ring's stages: how much there is, and what order has filled which block."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.ring.report_forwarder import ReportForwarder
from molink.wire.messages.ring_reports import HostMemoryReport


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of a stage: KV blocks that it has room for, and seconds to copy one."""

    blocks: int = 0
    block_s: float = 0.0


NO_HOST_MEMORY = HostMemory()


class HostMemoryReports(ReportForwarder):
    """The host memory of all stages, as stage ``stage`` knows it; each tells the others once."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self._stages_memory: dict[int, HostMemory] = {}

    def make_report(self, memory: HostMemory) -> HostMemoryReport:
        """This stage has so much: what to tell the next one."""
        self._stages_memory[self._stage] = memory
        return HostMemoryReport(self._stage, memory.blocks, memory.block_s)

    def accept_report(self, report: HostMemoryReport) -> bool:
        """The previous stage passes a report on; ``False`` if it makes no sense here."""
        if not self._is_other_stage(report.stage) or not 0 <= report.block_s < float("inf"):
            return False
        self._stages_memory.setdefault(report.stage, HostMemory(report.blocks, report.block_s))
        return True

    @property
    def common_memory(self) -> HostMemory:
        """What all stages have; nothing as long as one has said nothing."""
        rooms = self._stages_memory.values()
        if len(rooms) < self._stages:
            return NO_HOST_MEMORY
        return HostMemory(
            min(memory.blocks for memory in rooms), max(memory.block_s for memory in rooms)
        )


class HostBlockLedger:
    """Which order to swap out has filled each of ``blocks`` host blocks at one stage."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        #: By host block, its seq.
        self._filled: dict[int, int] = {}

    def fill_blocks(self, seq: int, hosts: Sequence[int]) -> bool:
        """Order ``seq`` copies there; ``False`` if there are no such blocks."""
        if not are_distinct(hosts, self._blocks):
            return False
        self._filled.update(dict.fromkeys(hosts, seq))
        return True

    def drain_blocks(self, swap_out_seq: int, hosts: Sequence[int]) -> bool:
        """What order ``filled`` has copied there comes back; ``False`` if it isn't there."""
        if not are_distinct(hosts, self._blocks):
            return False
        if any(self._filled.get(host) != swap_out_seq for host in hosts):
            return False
        for host in hosts:
            del self._filled[host]
        return True


def are_distinct(blocks: Sequence[int], total: int) -> bool:
    """Whether they are some of ``total`` blocks, none of them named twice."""
    within = len(blocks) > 0 and min(blocks) >= 0 and max(blocks) < total
    return within and len(set(blocks)) == len(blocks)
