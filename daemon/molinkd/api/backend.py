"""What the endpoint needs from the swarm, as a protocol; the daemon implements it."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from molink.swarm.frontend.generated_token import GeneratedToken
from molink.wire.messages.serving import Request


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a pipeline serves.

    ``folder`` is a local folder with at least config, tokenizer and chat template (never weights
    that only other peers have). ``max_model_len`` is in tokens. Requests of up to
    ``original_max_model_len`` are computed as the model was trained at first (LongRoPE); 0: there
    is no such bound. ``size`` is of all its weights, in bytes, 0 if not known, and ``root`` names
    its content.
    """

    name: str
    folder: Path
    max_model_len: int
    created: int
    original_max_model_len: int = 0
    size: int = 0
    root: str = ""


@dataclass(frozen=True, slots=True)
class StageLabels:
    """Which stage a worker's figures are of, as labels.

    ``layers`` is ``0:12``; ``sends`` and ``receives`` are its links, ``0-1`` from stage 0 to 1.
    """

    pipeline: str
    layers: str
    sends: str
    receives: str

    @classmethod
    def for_stage(
        cls, pipeline: str, layers: tuple[int, int], stage: int, stages: int
    ) -> "StageLabels":
        """The name of one of ``stages`` stages."""
        before, after = (stage - 1) % stages, (stage + 1) % stages
        return cls(pipeline, f"{layers[0]}:{layers[1]}", f"{stage}-{after}", f"{before}-{stage}")


@dataclass(frozen=True, slots=True)
class StageMetricValues:
    """What a stage's workers have counted, and what the one that there is measures."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricValues:
    """What a daemon and its workers count and measure, name → value; for Prometheus."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    stages: dict[StageLabels, StageMetricValues] = field(default_factory=dict)


class Backend(Protocol):
    """Everything behind the endpoint. All methods are called on the endpoint's own event loop."""

    def list_models(self) -> Sequence[ServedModel]:
        """Models that can be asked for now, ready or not."""
        ...

    def is_ready(self, model: str | None = None) -> bool:
        """Whether a pipeline can serve ``model`` (any model if ``None``) right now."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[GeneratedToken, None]:
        """Stream an answer; closing the generator (``aclose``) cancels the request.

        Raises (from the generator):
            ModelNotFound, ContextTooLong, Overloaded, Unavailable.
        """
        ...

    def collect_metrics(self) -> MetricValues:
        """Those of this daemon, its workers and links."""
        ...

    async def fetch_status(self) -> bytes:
        """``molink status --json`` as UTF-8.

        Raises:
            Unavailable: it can't be told now.
        """
        ...
