"""Experts split between the device and host memory, where the CPU runs them concurrently.

The device routes rows. The host reads back the chosen experts and the rows, launches the experts on
the device, and runs its own experts meanwhile. Each row's results are added in the order of its
choice, as if all experts were in one place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from molink.stage.decoder.expert_mlp import ExpertList, add_weighted
from molink.stage.decoder.expert_use import ExpertUse
from molink.stage.decoder.grouped_experts import GroupedExperts
from molink.stage.decoder.mlp import Mlp, SharedExpertMlp
from molink.stage.decoder.router import ExpertRouter
from molink.stage.device_copy import Download, begin_download, upload_tensor

#: Loads one expert for the device, as a group of its own, and another for host memory.
ReloadExperts = Callable[[int, int], tuple[ExpertList | GroupedExperts, Mlp]]


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows ``[T, hidden]`` and the weights of their experts, on the device.

    ``download`` copies the experts (``[T, top_k]``) and the rows to the host.
    """

    rows: Tensor
    weights: Tensor
    download: Download


@dataclass(frozen=True, slots=True)
class SplitExpertMlp:
    """Experts that a router chooses, in two groups.

    ``ranks`` (int64 ``[experts]``, on the host) maps experts to places: first those of the
    ``resident`` group, then those of the ``host`` group, which computes in ``host_dtype``. Results
    have type ``result_dtype``. Without ``reload`` both groups keep experts in the same form.
    """

    #: Each forward reads the chosen experts back from the device.
    capturable: ClassVar[bool] = False

    router: ExpertRouter
    resident: ExpertList | GroupedExperts
    host: ExpertList
    ranks: Tensor
    use: ExpertUse
    reload: ReloadExperts | None
    host_dtype: torch.dtype
    result_dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        return self.finish(self.route(rows))

    def route(self, rows: Tensor) -> RoutedRows:
        """Choose experts and start their download; later launches don't delay :meth:`finish`."""
        weights, experts = self.router.choose(rows)
        rows, weights = self.router.scale_rows(rows, weights.to(rows.dtype))
        return RoutedRows(rows, weights, begin_download([experts, rows]))

    def finish(self, routed: RoutedRows) -> Tensor:
        """Run the chosen experts; return rows ``[T, hidden]``."""
        experts, host_rows = routed.download.wait()
        ranks = self.ranks[experts.flatten()]
        order = ranks.argsort()  # (row, expert) pairs sorted by group and expert
        counted = ranks.bincount(minlength=len(self.ranks))
        self.use.record_choices(counted)
        counts: list[int] = counted.tolist()
        split = self.resident.count
        near = sum(counts[:split])
        sources, device = order // experts.shape[1], routed.rows.device
        moved = upload_tensor(torch.cat((sources[:near], order.argsort())), device)
        parts: list[Tensor] = []
        if near:
            parts.append(self.resident.multiply(routed.rows, moved[:near], counts[:split]))
        if near < len(order):
            given = host_rows.to(self.host_dtype)
            made = self.host.multiply(given, sources[near:], counts[split:])
            parts.append(upload_tensor(made.to(self.result_dtype), device))
        return add_weighted(torch.cat(parts)[moved[near:]], routed.weights)

    def swap_next(self) -> bool:
        """Swap an expert in host memory with a less used one on the device, if any.

        Returns whether it did. Call it between steps.
        """
        found = self.use.find_swap()
        if found is None:
            return False
        near, far = found
        slot, away = near, far - self.resident.count
        experts = [int((self.ranks == rank).nonzero()) for rank in (near, far)]
        if self.reload is not None:
            moved, expelled = self.reload(experts[1], experts[0])
            self.resident.put_expert(slot, moved)
            self.host.replace_expert(away, expelled)
        else:
            assert isinstance(self.resident, ExpertList)
            expelled = self.resident.experts[slot]
            self.resident.replace_expert(slot, self.host.experts[away])
            self.host.replace_expert(away, expelled)
        self.ranks[experts] = self.ranks[experts[::-1]]
        self.use.swap_places(near, far)
        return True

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.router.nbytes + self.resident.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return self.host.nbytes


@dataclass(frozen=True, slots=True)
class SharedSplitMlp(SharedExpertMlp):
    """Runs the shared expert while the host reads back the chosen experts."""

    routed: SplitExpertMlp

    def __call__(self, rows: Tensor) -> Tensor:
        routed = self.routed.route(rows)
        return self.run_shared(rows).add_(self.routed.finish(routed))
