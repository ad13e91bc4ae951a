"""A worker that waits after each step: see :mod:`tests.support.slow_stages`."""

import runpy
import time
from collections.abc import Callable
from typing import Any

from molinkd.worker import executor

#: Seconds: a stream gets fewer than forty tokens in one of them, and the processors are free.
STEP_S = 0.025


class SlowExecutor(executor.StageExecutor):
    """Steps report their real duration; the next one is delayed."""

    def __init__(self, stage: Any, requests: Any, hand_over: Callable[..., object]) -> None:
        def later(*arguments: Any) -> None:
            time.sleep(STEP_S)
            hand_over(*arguments)

        super().__init__(stage, requests, later)


executor.StageExecutor = SlowExecutor
runpy.run_module("molinkd.worker", run_name="__main__")
