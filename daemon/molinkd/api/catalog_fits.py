"""How the models of the catalog fit the swarm, and which of them to begin with."""

import asyncio
from collections.abc import Sequence

import msgspec

from molink.checkpoint.hub_catalog import load_catalog
from molink.facts.model import Quantize
from molink.sim.swarm_capacity import SwarmCapacity, describe_entry
from molink.swarm.placement.placement import Candidate

#: How many models are offered on a first start.
_MAX_OFFERS = 3


class CatalogModel(msgspec.Struct, frozen=True):
    """A model of the catalog and how it fits the swarm; sizes in bytes, speed of one request.

    ``quantize`` is the mildest mode in which it fits, ``None`` if it does not; ``tokens_per_s`` is
    ``None`` while PCs have not been measured.
    """

    name: str
    use: str
    license: str
    parameters: int
    download: int
    memory: int
    quantize: str | None
    stages: int
    tokens_per_s: float | None


class CatalogFits:
    """Places each model of the catalog as the swarm would, which takes seconds with many PCs.

    The result is kept until the PCs change; changes of links alone are not worth that.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._placed_on: tuple[tuple[Candidate, ...], Quantize] | None = None
        self._found: tuple[CatalogModel, ...] = ()

    async def describe_models(self, capacity: SwarmCapacity) -> tuple[CatalogModel, ...]:
        """The models that generate text, each in its usual format."""
        wanted = capacity.candidates, capacity.quantize
        async with self._lock:
            if wanted != self._placed_on:
                self._found = await asyncio.to_thread(_describe_catalog, capacity)
                self._placed_on = wanted
            return self._found


def _describe_catalog(capacity: SwarmCapacity) -> tuple[CatalogModel, ...]:
    found = []
    for entry in load_catalog().entries:
        if entry.is_default and entry.task == "generate":
            about = describe_entry(entry, capacity)
            fit = about.fit
            found.append(
                CatalogModel(
                    entry.name,
                    entry.use,
                    entry.license,
                    about.parameters,
                    about.download,
                    about.memory,
                    fit.quantize,
                    fit.num_stages,
                    round(fit.tokens_per_s, 1) or None,
                )
            )
    return tuple(found)


def choose_offers(models: Sequence[CatalogModel], quantize: str) -> tuple[str, ...]:
    """Choose up to three models that fit unchanged: the largest, one in between, a small one.

    A model that would write fewer than four tokens/s is not offered if others are faster, nor one
    of unknown speed if others are known.
    """
    fitting = [one for one in models if one.quantize == quantize]
    known = [one for one in fitting if one.tokens_per_s is not None]
    quick = [one for one in known if (one.tokens_per_s or 0) >= 4.0]
    order = sorted(quick or known or fitting, key=lambda one: one.parameters, reverse=True)
    if len(order) <= _MAX_OFFERS:
        return tuple(one.name for one in order)
    small = next(
        (one for one in reversed(order) if one.parameters >= order[0].parameters / 20), order[-1]
    )
    middle = order[len(order[: order.index(small)]) // 2]
    return tuple(dict.fromkeys(one.name for one in (order[0], middle, small)))
