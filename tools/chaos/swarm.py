"""A swarm of PCs on loopback, each with its own home and ports."""

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import psutil

from molink.errors import MolinkError
from molinkd.cli import daemon_client as local_daemon
from molinkd.peer.home import Home
from tools.chaos.network import Network
from tools.chaos.pc import ListenAddress, Pc, find_processes

#: Longest wait for a new swarm to be ready, in seconds.
START_S = 180.0
#: Seconds in which orphaned processes must exit.
ORPHAN_S = 20.0
_LOOK_S = 0.1


class Swarm:
    """PCs that serve a model together during an ``async with`` block."""

    def __init__(
        self,
        root: Path,
        count: int,
        *,
        model: str = "molink-demo",
        seed: int = 0,
        network: bool = False,
        absent: int = 0,
        device: str = "cpu",
        module: str = "molinkd",
    ) -> None:
        """The first of ``count`` PCs founds the swarm; the last ``absent`` ones do not join yet.

        ``network`` puts a fault-injecting network between them. All stages use ``device``.
        ``module`` is run in place of ``molink``.
        """
        rng = random.Random(seed)
        self.root = root
        self.model = model
        self._present = count - absent
        self.pcs: list[Pc] = []
        for number in range(1, count + 1):
            host = f"127.0.0.{number}"
            advertised = f"127.0.1.{number}" if network else host
            place = ListenAddress.free(host, advertised, rng)
            options = ["--device", device]
            self.pcs.append(Pc(f"pc{number}", root / f"pc{number}", place, options, module))
        self.network = Network(self.pcs) if network else None
        self._stack = ExitStack()
        #: Problems found at the end.
        self.left_behind: list[str] = []

    @property
    def founder(self) -> Pc:
        """The PC that made the swarm."""
        return self.pcs[0]

    async def __aenter__(self) -> Self:
        try:
            if self.network is not None:
                self._stack.enter_context(self.network)
            await self._start_founder()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _start_founder(self) -> None:
        self.start(self.founder)
        home = Home(self.founder.home)
        await self.until(lambda: home.membership.exists(), START_S)
        await self.until(lambda: home.device.exists(), START_S)
        for pc in self.pcs[1 : self._present]:
            await self.admit(pc)
        await self.ready(START_S)

    async def admit(self, pc: Pc) -> None:
        """Let a PC join with a token of the founder."""
        # All PCs share one device, so one measurement is enough.
        shutil.copyfile(Home(self.founder.home).device, Home(pc.home).device)
        founder = Home(self.founder.home)
        invite = await asyncio.to_thread(
            local_daemon.create_invitation, founder, ttl=3600.0, uses=1
        )
        pc.start("join", invite.token)

    def start(self, pc: Pc) -> None:
        """Start or restart a PC's daemon."""
        if pc is self.founder:
            stages = str(self._present)
            pc.start(
                "up",
                "--model",
                self.model,
                "--dtype",
                "f32",
                "--min-peers",
                stages,
                "--min-stages",
                "16",
            )
        else:
            pc.start("join")

    def start_all(self) -> None:
        """Start all stopped PCs."""
        for pc in self.pcs:
            if not pc.running:
                self.start(pc)

    async def ready(self, timeout: float) -> None:
        """Wait until every running PC's endpoint is ready, or raise :class:`TimeoutError`."""
        limit = aiohttp.ClientTimeout(total=5)
        deadline = time.monotonic() + timeout
        async with aiohttp.ClientSession(timeout=limit) as session:
            for pc in self.pcs:
                while pc.running and not await _is_ready(session, pc.url):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{pc.name} isn't ready:\n{pc.output[-2000:]}")
                    await asyncio.sleep(_LOOK_S)

    async def serves(self, pc: Pc, timeout: float) -> None:
        """Wait until a PC's stage serves, or raise :class:`TimeoutError`."""
        deadline = time.monotonic() + timeout
        while pc.name not in await asyncio.to_thread(self.stages):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pc.name} doesn't serve:\n{pc.output[-2000:]}")
            await asyncio.sleep(_LOOK_S)

    async def until(self, condition: Callable[[], object], timeout: float) -> None:
        """Wait until ``condition()`` holds, or raise :class:`TimeoutError`."""
        deadline = time.monotonic() + timeout
        while not condition():
            if not self.founder.running or time.monotonic() > deadline:
                raise TimeoutError(f"the swarm doesn't get ready:\n{self.founder.output[-2000:]}")
            await asyncio.sleep(_LOOK_S)

    def status(self) -> dict[str, Any] | None:
        """Fetch the leader's status; ``None`` without a running coordinator. Blocks."""
        found = local_daemon.find_daemon(Home(self.leader().home))
        with contextlib.suppress(MolinkError):
            if found is not None:
                status = local_daemon.fetch_status(found)
                if status["coordinator"]["state"] == "running":
                    return status
        return None

    def stages(self) -> dict[str, int]:
        """Process ids of the serving workers by PC."""
        status = self.status()
        if status is None or not any(pipeline["ready"] for pipeline in status["pipelines"]):
            return {}
        ids = {s["peer"] for pipeline in status["pipelines"] for s in pipeline["stages"]}
        workers = ((p["name"], w) for p in status["peers"] if p["id"] in ids for w in p["workers"])
        return {name: worker["pid"] for name, worker in workers if worker["state"] == "ready"}

    def leader(self) -> Pc:
        """The PC with the coordinator; the founder if there is none."""
        return next((pc for pc in self.pcs if pc.processes("coordinator")), self.founder)

    async def close(self) -> None:
        """Stop all PCs; :attr:`left_behind` lists what did not end properly."""
        for pc in self.pcs:
            for process in pc.processes():
                with contextlib.suppress(psutil.Error):
                    process.resume()
        # All at once, so that no PC takes over layers of those that left.
        ends = [asyncio.to_thread(pc.stop) for pc in self.pcs]
        errors = await asyncio.gather(*ends, return_exceptions=True)
        self.left_behind += [str(error) for error in errors if error is not None]
        await asyncio.to_thread(self._kill_orphans)
        self._stack.close()

    def _kill_orphans(self) -> None:
        for pc in self.pcs:
            _, left = psutil.wait_procs(find_processes(pc.home), ORPHAN_S)
            for process in left:
                self.left_behind.append(f"{pc.name} left {process}")
                process.kill()


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/readyz") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
