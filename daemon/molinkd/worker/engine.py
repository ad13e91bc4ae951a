"""Interfaces between a worker and the model it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from molink.checkpoint.adapters import Adapter
from molink.checkpoint.vision import VisionConfig
from molink.facts.drafts import DraftModelFacts
from molink.facts.dtypes import WeightDType
from molink.facts.images import ImageInput
from molink.facts.profile import Profile
from molink.ring.stage import DraftRunner, StepExecutor
from molink.scheduler.speculation.answer_history import AnswerHistory
from molink.text.grammar_matcher import GrammarCompiler
from molink.wire.messages.worker_pipe import LoadStage
from molinkd.worker.request_table import RequestTable

#: Calls a function with its argument on the ring's thread.
HandOver = Callable[..., object]


#: Rows of each image, or why there are none.
EncodedImages = Sequence[object] | str


class ImageEncoderLike(Protocol):
    """Runs a vision tower; :class:`molinkd.worker.image_encoder.ImageEncoder` uses a thread."""

    def encode_images(
        self,
        images: Sequence[ImageInput],
        is_wanted: Callable[[], bool],
        hand_over: HandOver,
        done: Callable[[EncodedImages], None],
    ) -> None:
        """Encode ``images``; ``hand_over(done, result)`` is called on another thread.

        So is ``is_wanted()``; once it is false, the result is an error.
        """


class StageConfig(Protocol):
    """Model properties that a stage runtime depends on; ``ModelConfig`` has them."""

    @property
    def hidden_size(self) -> int:
        """Elements per row."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a request."""

    @property
    def keys_depend_on_length(self) -> bool:
        """Whether a token's keys depend on the length its request may reach."""

    @property
    def keeps_states(self) -> bool:
        """See :attr:`molink.checkpoint.traits.FamilyTraits.keeps_states`."""

    @property
    def short_context(self) -> int:
        """See :attr:`molink.checkpoint.traits.FamilyTraits.short_context`."""

    @property
    def adapters(self) -> Sequence[Adapter]:
        """The model's adapters, in the order of their numbers."""

    @property
    def vision(self) -> VisionConfig | None:
        """The model's vision tower, if it has one."""


class LoadedStage(Protocol):
    """Loaded layers, ready to run; implemented by :class:`molink.stage.stage.Stage`."""

    @property
    def config(self) -> StageConfig:
        """The model's config."""

    @property
    def dtype(self) -> WeightDType:
        """Type in which it computes."""

    @property
    def wire_dtype(self) -> WeightDType:
        """Type of rows between stages."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""

    @property
    def is_last(self) -> bool:
        """Whether it samples."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""

    @property
    def host_expert_bytes(self) -> int:
        """Bytes of experts in host memory."""

    @property
    def resident_share(self) -> float:
        """Share of recent choices of experts that were on the device; 0 without others."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block."""

    def count_blocks(self, nbytes: int, block_size: int) -> int:
        """KV blocks that fit ``nbytes``, with states of requests where the model keeps some."""

    def pool_bytes(self, blocks: int, block_size: int) -> int:
        """Bytes of ``blocks`` KV blocks, with these states."""

    def allocate_kv_pool(self, blocks: int, block_size: int) -> None:
        """Allocate a fresh KV pool, with these states; earlier ones are freed first."""

    def open_host_pool(self, nbytes: int, stages_per_host: int) -> tuple[int, float]:
        """Allocate host memory; return the number of KV blocks, and seconds to copy one."""


class ClosableExecutor(StepExecutor, Protocol):
    """A step executor that can be closed."""

    def submit_task(self, task: Callable[[], None]) -> None:
        """Queue another computation."""

    def close(self) -> None:
        """Finish the queued steps, then end."""


#: Loads the stage that a :class:`LoadStage` describes; called on a separate thread.
LoadEngine = Callable[[LoadStage], "StageEngine"]


@dataclass(frozen=True, slots=True)
class DraftEngine:
    """A loaded draft model. ``create_model`` gives it a fresh KV pool.

    Its arguments submit a task between the stage's steps, and hand results to the ring's thread.
    """

    facts: DraftModelFacts
    create_model: Callable[[Callable[[Callable[[], None]], None], HandOver], DraftRunner]


@dataclass(frozen=True, slots=True)
class StageEngine:
    """A loaded stage, its profile, and a factory for its executors (one per epoch).

    ``reload`` loads another stage in its place and reuses weights that both have; without it, the
    other stage is loaded from scratch.
    """

    stage: LoadedStage
    profile: Profile
    create_executor: Callable[[RequestTable, HandOver], ClosableExecutor]
    reload: LoadEngine | None = None
    #: Compiles requests' grammars; last stage only.
    grammars: GrammarCompiler | None = None
    #: Draft model on the first stage, if configured.
    draft: DraftEngine | None = None
    #: Runs the vision tower, on the first stage of a model that sees.
    images: ImageEncoderLike | None = None
    #: Seconds spent on the profile.
    profile_s: float = 0.0
    #: The model's answers, which draft later ones; outlives epochs.
    history: AnswerHistory = field(default_factory=AnswerHistory)
