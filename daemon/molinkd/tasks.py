"""Cancelling asyncio tasks."""

import asyncio
from typing import Any


async def cancel_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks and wait until they have ended; their errors are ignored."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
