"""What becomes of the keys and values of a request that is preempted."""

from typing import Literal, get_args

#: ``recompute``: they are given up, and computed anew when its turn has come again.
#: ``reactive-swap``: they go to memory of the host when others lack blocks, and come back when it
#: is its turn; who needs the blocks waits meanwhile. ``proactive-swap``: they go before others lack
#: blocks, and come back before its turn (FastServe, §4.2).
PreemptionMode = Literal["recompute", "reactive-swap", "proactive-swap"]
PREEMPTION_MODES: tuple[PreemptionMode, ...] = get_args(PreemptionMode)
#: Host memory that a stage may use for it if nothing is said, in bytes: as vLLM's ``--swap-space``.
SWAP_SPACE = 4 << 30
