"""Layers whose MLP is a choice of experts: how many there are, and which layers have them."""

from dataclasses import dataclass

from molink.checkpoint.fields import Fields
from molink.errors import BrokenModel

#: A damaged config must not make a list of tensors that exhausts memory.
_MAX_EXPERTS = 1024
_MAX_EXPERTS_OF_MODEL = 2**16
MAX_INNER = 2**20


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model's layers, and how their tensors are called.

    A row goes through the ``chosen`` of ``count`` experts that the router prefers; with
    ``normalized`` their weights sum to 1. Layers in ``dense`` have a plain MLP. ``module``,
    ``gate``, ``gate_up`` and ``down`` are parts of the tensors' names; ``gate_up`` may be one for
    both. With ``biased`` all have biases, the router too. All rows go through one more
    expert of ``shared_size``, weighted by a gate of its own; 0 = there is none.
    """

    count: int
    chosen: int
    inner_size: int
    normalized: bool
    dense: frozenset[int] = frozenset()
    module: str = "mlp"
    gate: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    biased: bool = False
    shared_size: int = 0

    @property
    def router(self) -> str:
        """Name of the projection that rates the experts."""
        return f"{self.module}.{self.gate}"

    @property
    def shared_gate(self) -> str:
        """Name of the projection that weighs the shared expert."""
        return f"{self.module}.shared_expert_gate"

    @property
    def shared_projections(self) -> tuple[tuple[str, ...], str]:
        """Names of the projections that make gate and up of the shared expert, and that after."""
        return self._named(f"{self.module}.shared_expert.")

    def projections(self, index: int) -> tuple[tuple[str, ...], str]:
        """Names of the projections that make gate and up of an expert, and that after."""
        return self._named(f"{self.module}.experts.{index}.")

    def _named(self, prefix: str) -> tuple[tuple[str, ...], str]:
        return tuple(prefix + name for name in self.gate_up), prefix + self.down


def mixtral_experts(fields: Fields, layers: int) -> Experts:
    """Experts as Mixtral has them: in all layers.

    Raises:
        BrokenModel: a field that is impossible; named.
    """
    experts = Experts(
        count=fields.integer("num_local_experts", 8, maximum=_MAX_EXPERTS),
        chosen=fields.integer("num_experts_per_tok", 2),
        inner_size=fields.integer("intermediate_size", maximum=MAX_INNER),
        normalized=True,
        module="block_sparse_moe",
        gate_up=("w1", "w3"),
        down="w2",
    )
    return _checked(experts, layers, fields.where)


def qwen_experts(fields: Fields, layers: int) -> Experts:
    """Experts as Qwen2-MoE and Qwen3-MoE have them: each ``decoder_sparse_step``-th layer.

    There are exceptions. The shared one of Qwen2-MoE is left out.

    Raises:
        BrokenModel: a field that is impossible; named.
    """
    step = fields.integer("decoder_sparse_step", 1)
    plain = frozenset(fields.integers("mlp_only_layers"))
    # transformers 5 writes `num_local_experts` for what checkpoints call `num_experts`.
    known = fields.integer("num_local_experts", 128, maximum=_MAX_EXPERTS)
    experts = Experts(
        count=fields.integer("num_experts", known, maximum=_MAX_EXPERTS),
        chosen=fields.integer("num_experts_per_tok", 8),
        inner_size=fields.integer("moe_intermediate_size", 768, maximum=MAX_INNER),
        normalized=fields.boolean("norm_topk_prob", False),
        dense=frozenset(layer for layer in range(layers) if layer in plain or (layer + 1) % step),
    )
    return _checked(experts, layers, fields.where)


def gpt_oss_experts(fields: Fields, layers: int) -> Experts:
    """Experts as gpt-oss has them: in all layers, biased, gate and up in one.

    Raises:
        BrokenModel: a field that is impossible; named.
    """
    experts = Experts(
        count=fields.integer("num_local_experts", 128, maximum=_MAX_EXPERTS),
        chosen=fields.integer("num_experts_per_tok", 4),
        inner_size=fields.integer("intermediate_size", maximum=MAX_INNER),
        normalized=True,
        gate="router",
        gate_up=("gate_up_proj",),
        biased=True,
    )
    return _checked(experts, layers, fields.where)


def _checked(experts: Experts, layers: int, where: str) -> Experts:
    if experts.chosen > experts.count:
        raise BrokenModel(
            f"{where}: num_experts_per_tok {experts.chosen} is more than the {experts.count} "
            "experts there are"
        )
    if experts.count * layers > _MAX_EXPERTS_OF_MODEL:
        raise BrokenModel(
            f"{where}: num_experts {experts.count} in {layers} layers are over "
            f"{_MAX_EXPERTS_OF_MODEL} experts"
        )
    return experts
