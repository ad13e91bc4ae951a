"""Compared systems: the paper's on our baseline, and our switches one by one."""

from dataclasses import dataclass, replace

from molink.facts.dtypes import Compression
from tools.paperbench.published import MAX_PROMPT, STAGES

#: Lets the scheduler choose.
AUTO = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """One system. Its defaults are the baseline: one tensor per hop, whole prompts stored and
    forwarded, uncompressed, ``K = N``.
    """

    name: str
    policy: str = "fifo"
    cut_through: bool = False
    compression: Compression = "none"
    micro_batches: int = STAGES
    tensors: int = 1
    max_num_batched_tokens: int = MAX_PROMPT
    prefill_only: bool = False


def _derive(variant: Variant, name: str, **changed: object) -> Variant:
    return replace(variant, name=name, **changed)  # type: ignore[arg-type]


CONCURRENT = Variant("concurrent", policy="concurrent")
FIFO = Variant("fifo")
TWO_TENSORS = Variant("fifo, two tensors", tensors=2)
CONCURRENT_TWO = Variant("concurrent, two tensors", policy="concurrent", tensors=2)
#: The paper's own system: Algorithm 1 and more micro-batches.
MOLINK = Variant("molink", policy="molink", micro_batches=AUTO)
MOLINK_CHUNKS = Variant("molink, K = N", policy="molink")

POLICY = Variant("adaptive", policy="adaptive")
CUT_THROUGH = _derive(POLICY, "+ cut-through", cut_through=True, max_num_batched_tokens=AUTO)
COMPRESSION = _derive(CUT_THROUGH, "+ compression", compression="lossless")
K_AUTO = _derive(COMPRESSION, "+ K auto", micro_batches=AUTO)
ALL = _derive(K_AUTO, "+ prefill-only", prefill_only=True)
#: Our switches, each added to those before it.
STEPS = (POLICY, CUT_THROUGH, COMPRESSION, K_AUTO, ALL)
UNCOMPRESSED = _derive(ALL, "all but compression", compression="none")
#: Other link policies with all further switches.
MOLINK_ALL = _derive(ALL, "molink, all switches", policy="molink")
CONCURRENT_ALL = _derive(ALL, "concurrent, all switches", policy="concurrent")
RIVALS = (CONCURRENT_ALL, MOLINK_ALL)

CUT_THROUGH_ALONE = _derive(
    FIFO, "cut-through alone", cut_through=True, max_num_batched_tokens=AUTO
)
COMPRESSION_ALONE = _derive(FIFO, "compression alone", compression="lossless")
K_ALONE = _derive(FIFO, "K auto alone", micro_batches=AUTO)
PREFILL_ONLY_ALONE = _derive(FIFO, "prefill-only alone", prefill_only=True)
#: Single switches on ``fifo``.
ALONE = (CUT_THROUGH_ALONE, COMPRESSION_ALONE, K_ALONE, PREFILL_ONLY_ALONE)

#: Systems of every row: the paper's and our steps.
ALWAYS = (CONCURRENT, FIFO, MOLINK, *STEPS, *RIVALS)
#: Everything, in the order of the tables.
VARIANTS = (CONCURRENT_TWO, TWO_TENSORS, *ALWAYS, UNCOMPRESSED, *ALONE)
#: Table 5 in the paper's words.
ABLATION = {
    "both": MOLINK,
    "chunked transmission only": MOLINK_CHUNKS,
    "more micro-batches only": K_ALONE,
    "neither": FIFO,
}
