"""Verification state of the store's weight files."""

import asyncio
import logging
from functools import partial
from pathlib import Path

from molink.errors import AlteredModel, BrokenModel
from molink.swarm.artifacts.fetch_plan import GroupPlan
from molinkd.peer.artifacts.hashing import FileStamp, run_in_thread
from molinkd.peer.artifacts.partial_shard import remove_partials
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.stored_model import record_verified_shard, verify_file

log = logging.getLogger(__name__)


class VerifiedFiles:
    """Stamps of verified files; each file is verified once, and again if it changes."""

    def __init__(self) -> None:
        self._stamps: dict[Path, FileStamp] = {}

    async def mark_verified(self, path: Path) -> None:
        """Record a file that was verified while it arrived."""
        self._stamps[path] = await asyncio.to_thread(FileStamp.of_path, path)

    async def is_verified(self, folder: Path, plan: GroupPlan, progress: Progress) -> bool:
        """Whether a file is present and valid; counts its bytes in ``progress``."""
        path = folder / plan.file
        try:
            stamp = await asyncio.to_thread(FileStamp.of_path, path)
            if self._stamps.get(path) == stamp:
                progress.add_existing(plan.nbytes)
            else:
                await run_in_thread(partial(verify_file, path, plan, progress))
                self._stamps[path] = stamp
                if plan.shard is not None:
                    await asyncio.to_thread(record_verified_shard, folder, plan.file, stamp)
        except FileNotFoundError:
            return False
        except (OSError, AlteredModel, BrokenModel) as error:
            log.warning("%s was altered (%s): fetching it again", path, error)
            return False
        if plan.shard is not None:
            await asyncio.to_thread(remove_partials, path)
        return True
