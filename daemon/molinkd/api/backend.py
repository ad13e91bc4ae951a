"""What the endpoint needs from the swarm, as a protocol. The daemon implements it."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from molink.checkpoint.model_task import GENERATE, ModelTask
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.wire.messages.serving import Request


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a pipeline serves.

    ``folder`` is a local folder with at least config, tokenizer and chat template; its weights may
    be on other peers. ``max_model_len`` is in tokens. Requests of up to ``original_max_model_len``
    tokens use the original position embeddings (LongRoPE); 0: no such limit. ``size`` is the size
    of all weights in bytes, ``parameters`` their number; 0 if unknown. ``quantization`` names the
    form in which they are stored. ``root`` identifies the model's content, ``task`` is what
    it is made for, and ``hidden_size`` is the length of its rows. ``adapters`` are the names of its
    adapters; each is a model of its own for clients, whose ``base`` is this one's name.
    ``sees_images`` tells whether it takes images.
    """

    name: str
    folder: Path
    max_model_len: int
    created: int
    original_max_model_len: int = 0
    size: int = 0
    root: str = ""
    task: ModelTask = GENERATE
    hidden_size: int = 0
    adapters: tuple[str, ...] = ()
    base: str = ""
    parameters: int = 0
    quantization: str = ""
    sees_images: bool = False

    @property
    def pipeline_model(self) -> str:
        """Name of the model whose pipelines serve it."""
        return self.base or self.name

    @property
    def adapter(self) -> str:
        """The adapter of requests for it; empty for none."""
        return self.name if self.base else ""

    def list_adapters(self) -> "list[ServedModel]":
        """Its adapters, as clients see them."""
        return [replace(self, name=name, adapters=(), base=self.name) for name in self.adapters]


@dataclass(frozen=True, slots=True)
class StageLabels:
    """Prometheus labels of a stage.

    ``layers`` is such as ``0:12``; ``sends`` and ``receives`` are its links, such as ``0-1`` from
    stage 0 to 1.
    """

    pipeline: str
    layers: str
    sends: str
    receives: str

    @classmethod
    def for_stage(
        cls, pipeline: str, layers: tuple[int, int], stage: int, stages: int
    ) -> "StageLabels":
        """Label one of ``stages`` stages."""
        before, after = (stage - 1) % stages, (stage + 1) % stages
        return cls(pipeline, f"{layers[0]}:{layers[1]}", f"{stage}-{after}", f"{before}-{stage}")


@dataclass(frozen=True, slots=True)
class StageMetricValues:
    """Counters of a stage over all its workers, and gauges of the current worker."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricValues:
    """Counters and gauges of a daemon and its workers, for Prometheus."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    stages: dict[StageLabels, StageMetricValues] = field(default_factory=dict)


class Backend(Protocol):
    """The swarm behind the endpoint. All methods are called on the endpoint's event loop."""

    def list_models(self) -> Sequence[ServedModel]:
        """Return the models that clients may request, ready or not; adapters are in these."""
        ...

    def is_ready(self, model: str | None = None) -> bool:
        """Whether a pipeline can serve ``model``, or the adapter of that name, now.

        ``None`` means any model.
        """
        ...

    def generate(self, request: Request) -> AsyncGenerator[GeneratedToken, None]:
        """Stream an answer. Closing the generator (``aclose``) cancels the request.

        Raises (from the generator):
            ModelNotFound, ContextTooLong, Overloaded, Unavailable.
        """
        ...

    def collect_metrics(self) -> MetricValues:
        """Collect the metrics of this daemon, its workers and links."""
        ...

    async def fetch_status(self) -> bytes:
        """Return ``molink status --json`` as UTF-8.

        Raises:
            Unavailable: the status is not available.
        """
        ...
