"""What a worker needs of the model it runs, apart from how that is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from molink.facts.drafts import DraftModelFacts
from molink.facts.dtypes import WeightDType
from molink.facts.profile import Profile
from molink.ring.stage import DraftRunner, StepExecutor
from molink.text.grammar_matcher import GrammarCompiler
from molink.wire.messages.worker_pipe import LoadStage
from molinkd.worker.request_table import RequestTable

#: Calls a function with its argument on the ring's thread.
HandOver = Callable[..., object]


class StageConfig(Protocol):
    """What a place in a ring depends on of a model, as ``ModelConfig`` says."""

    @property
    def hidden_size(self) -> int:
        """Elements of a row."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""

    @property
    def keys_depend_on_length(self) -> bool:
        """Whether what is computed of a token depends on how long its request may become."""

    @property
    def short_context(self) -> int:
        """See :attr:`molink.checkpoint.traits.FamilyTraits.short_context`."""


class LoadedStage(Protocol):
    """Layers that are ready to run; :class:`molink.stage.stage.Stage` is one."""

    @property
    def config(self) -> StageConfig:
        """The model that the layers are of."""

    @property
    def wire_dtype(self) -> WeightDType:
        """Of rows on their way."""

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""

    @property
    def is_last(self) -> bool:
        """Whether it samples."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its weights."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block."""

    def allocate_kv_pool(self, blocks: int, block_size: int) -> None:
        """Make a fresh KV pool; an earlier one is dropped first."""

    def open_host_pool(self, nbytes: int, stages_per_host: int) -> tuple[int, float]:
        """Host memory for KV blocks: how many there are, and seconds to copy one."""


class ClosableExecutor(StepExecutor, Protocol):
    """An executor that can be ended."""

    def submit_task(self, task: Callable[[], None]) -> None:
        """Queue something else that computes."""

    def close(self) -> None:
        """End after the steps that are queued."""


#: Loads what :class:`LoadStage` asks for; it is called on a thread of its own.
LoadEngine = Callable[[LoadStage], "StageEngine"]


@dataclass(frozen=True, slots=True)
class DraftEngine:
    """A loaded draft model; ``create_model`` gives it a fresh KV pool.

    It is told what has its tasks run between the stage's steps, and what hands their results over.
    """

    facts: DraftModelFacts
    create_model: Callable[[Callable[[Callable[[], None]], None], HandOver], DraftRunner]


@dataclass(frozen=True, slots=True)
class StageEngine:
    """A loaded stage, how long its steps take, and what runs them (one per epoch).

    ``reload`` loads another stage in its place, and need not load again what both have. Without it
    the other one is loaded as the first was.
    """

    stage: LoadedStage
    profile: Profile
    create_executor: Callable[[RequestTable, HandOver], ClosableExecutor]
    reload: LoadEngine | None = None
    #: Compiles the grammars of requests, at the last stage.
    grammars: GrammarCompiler | None = None
    #: A small model beside it, where the head asks for drafts.
    draft: DraftEngine | None = None
    #: Seconds that finding the profile took.
    profile_s: float = 0.0
