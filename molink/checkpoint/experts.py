"""Mixture-of-experts layers: number of experts, tensor names, and which layers have them."""

from dataclasses import dataclass

from molink.checkpoint.config_fields import ConfigFields
from molink.errors import BrokenModel

#: Limits for damaged configs, which must not exhaust memory.
_MAX_EXPERTS = 1024
_MAX_EXPERTS_OF_MODEL = 2**16
MAX_EXPERT_SIZE = 2**20


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts of a model's layers, and the names of their tensors.

    The router chooses ``top_k`` of ``num_experts`` experts for each row; with ``renormalize`` their
    weights sum to 1. Layers in ``dense_layers`` have a plain MLP. ``module``, ``gate``, ``gate_up``
    and ``down`` are parts of tensor names; ``gate_up`` may be one name for both. With ``has_bias``
    all projections have biases, including the router. A shared expert of
    ``shared_intermediate_size`` (0 = none) processes all rows and has its own gate.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    dense_layers: frozenset[int] = frozenset()
    module: str = "mlp"
    gate: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    has_bias: bool = False
    shared_intermediate_size: int = 0

    @property
    def router_name(self) -> str:
        """Name of the router projection."""
        return f"{self.module}.{self.gate}"

    @property
    def shared_gate_name(self) -> str:
        """Name of the shared expert's gate projection."""
        return f"{self.module}.shared_expert_gate"

    @property
    def shared_projections(self) -> tuple[tuple[str, ...], str]:
        """Names of the shared expert's gate and up projections, and of its down projection."""
        return self._projection_names(f"{self.module}.shared_expert.")

    def expert_projections(self, index: int) -> tuple[tuple[str, ...], str]:
        """Names of an expert's gate and up projections, and of its down projection."""
        return self._projection_names(f"{self.module}.experts.{index}.")

    def _projection_names(self, prefix: str) -> tuple[tuple[str, ...], str]:
        return tuple(prefix + name for name in self.gate_up), prefix + self.down


def mixtral_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Mixtral: experts in all layers."""
    experts = ExpertsConfig(
        num_experts=fields.get_integer("num_local_experts", 8, maximum=_MAX_EXPERTS),
        top_k=fields.get_integer("num_experts_per_tok", 2),
        intermediate_size=fields.get_integer("intermediate_size", maximum=MAX_EXPERT_SIZE),
        renormalize=True,
        module="block_sparse_moe",
        gate_up=("w1", "w3"),
        down="w2",
    )
    return _check_experts(experts, layers, fields.where)


def qwen_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Qwen2-MoE and Qwen3-MoE: experts in every ``decoder_sparse_step``-th layer.

    The shared expert of Qwen2-MoE is not included.
    """
    step = fields.get_integer("decoder_sparse_step", 1)
    plain = frozenset(fields.get_integers("mlp_only_layers"))
    # transformers 5 writes `num_local_experts` for what checkpoints call `num_experts`.
    known = fields.get_integer("num_local_experts", 128, maximum=_MAX_EXPERTS)
    experts = ExpertsConfig(
        num_experts=fields.get_integer("num_experts", known, maximum=_MAX_EXPERTS),
        top_k=fields.get_integer("num_experts_per_tok", 8),
        intermediate_size=fields.get_integer("moe_intermediate_size", 768, maximum=MAX_EXPERT_SIZE),
        renormalize=fields.get_boolean("norm_topk_prob", False),
        dense_layers=frozenset(
            layer for layer in range(layers) if layer in plain or (layer + 1) % step
        ),
    )
    return _check_experts(experts, layers, fields.where)


def gpt_oss_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """gpt-oss: experts in all layers, with biases; gate and up are one projection."""
    experts = ExpertsConfig(
        num_experts=fields.get_integer("num_local_experts", 128, maximum=_MAX_EXPERTS),
        top_k=fields.get_integer("num_experts_per_tok", 4),
        intermediate_size=fields.get_integer("intermediate_size", maximum=MAX_EXPERT_SIZE),
        renormalize=True,
        gate="router",
        gate_up=("gate_up_proj",),
        has_bias=True,
    )
    return _check_experts(experts, layers, fields.where)


def _check_experts(experts: ExpertsConfig, layers: int, where: str) -> ExpertsConfig:
    if experts.top_k > experts.num_experts:
        raise BrokenModel(
            f"{where}: num_experts_per_tok {experts.top_k} exceeds the {experts.num_experts} "
            "experts"
        )
    if experts.num_experts * layers > _MAX_EXPERTS_OF_MODEL:
        raise BrokenModel(
            f"{where}: num_experts {experts.num_experts} in {layers} layers are over "
            f"{_MAX_EXPERTS_OF_MODEL} experts"
        )
    return experts
