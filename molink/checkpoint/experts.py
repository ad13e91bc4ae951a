"""Mixture-of-experts layers: number of experts, tensor names, and which layers have them."""

from dataclasses import dataclass, replace
from typing import Literal

from molink.checkpoint.config_fields import ConfigFields
from molink.errors import BrokenModel, UnsupportedModel

#: Limits for damaged configs, which must not exhaust memory.
_MAX_EXPERTS = 1024
_MAX_EXPERTS_OF_MODEL = 2**16
MAX_EXPERT_SIZE = 2**20
#: How a row's experts are scored: a softmax over all, a sigmoid of each, or SparseMixer, which
#: picks one expert after the other.
Scoring = Literal["softmax", "sigmoid", "sparsemixer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router chooses ``top_k`` of ``num_experts`` experts for a row and weights them.

    ``scoring`` maps logits to scores. The experts with the highest scores are chosen. With
    ``is_corrected``, a learned correction per expert is added to the scores for this choice only
    (arXiv 2408.15664). Of ``groups`` equal groups of experts, only the ``top_groups`` with the
    highest sums of their ``group_voters`` (1 or 2) best experts take part (DeepSeek-V3, arXiv
    2412.19437, §2.1.2). An expert's weight is its score times ``scale``; with ``renormalize`` the
    score is first divided by the sum of the row's chosen scores (at least ``min_sum``). The weight
    multiplies the expert's output or, with ``scales_input``, the input of a row's only expert.

    ``sparsemixer`` (arXiv 2409.12136) chooses experts one after the other. The best one's weight is
    its probability among the experts with logits close to its own: the difference is at most ``2 *
    jitter`` times the larger magnitude. The next choice excludes it.
    """

    num_experts: int
    top_k: int
    renormalize: bool
    scoring: Scoring = "softmax"
    is_corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    group_voters: int = 2
    min_sum: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0
    scales_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(Routing):
    """Experts of a model's layers, and the names of their tensors.

    Layers in ``dense_layers`` have a plain MLP. ``module``, ``gate``, ``correction``, ``gate_up``,
    ``down``, ``shared`` and ``shared_gate`` are parts of tensor names; ``gate_up`` may be one name
    for both. Corrections have ``correction_dims`` dimensions, of which the last counts experts.
    With ``has_bias`` all projections have biases, including the router. With ``has_wide_router``
    the router computes in float32, since 16 bits cannot separate close scores. Unless ``is_gated``,
    ``gate_up`` is the up projection alone. A shared expert of width ``shared_intermediate_size``
    (0: none; several are merged into one) processes all rows; with ``shared_gate`` a gate weights
    its output. ``shared_names`` are the full names of its projections, if they don't follow the
    pattern. With ``is_paired`` the routed experts, the shared expert and the router each have their
    own norms. With a ``latent_size`` routed experts read and return latents; the projections
    ``latent_names`` map rows to latents and back.
    """

    intermediate_size: int
    dense_layers: frozenset[int] = frozenset()
    module: str = "mlp"
    gate: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    correction_dims: int = 1
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    has_bias: bool = False
    is_gated: bool = True
    has_wide_router: bool = False
    shared_intermediate_size: int = 0
    shared: str = "shared_experts"
    shared_gate: str | None = None
    shared_names: tuple[tuple[str, ...], str] | None = None
    is_paired: bool = False
    latent_size: int = 0

    @property
    def latent_names(self) -> tuple[str, str]:
        """Names of the projections from rows to latents and back."""
        return f"{self.module}.fc1_latent_proj", f"{self.module}.fc2_latent_proj"

    @property
    def router_name(self) -> str:
        """Name of the router projection."""
        return f"{self.module}.{self.gate}"

    @property
    def correction_name(self) -> str:
        """Name of the tensor that holds the experts' corrections."""
        return f"{self.module}.{self.correction}"

    @property
    def correction_shape(self) -> tuple[int, ...]:
        """Shape of that tensor."""
        return (1,) * (self.correction_dims - 1) + (self.num_experts,)

    @property
    def shared_gate_name(self) -> str | None:
        """Name of the shared expert's gate projection, if it has one."""
        return None if self.shared_gate is None else f"{self.module}.{self.shared_gate}"

    @property
    def shared_projections(self) -> tuple[tuple[str, ...], str]:
        """Names of the shared expert's gate and up projections, and of its down projection."""
        return self.shared_names or self._projection_names(f"{self.module}.{self.shared}.")

    def expert_projections(self, index: int) -> tuple[tuple[str, ...], str]:
        """Names of an expert's gate and up projections, and of its down projection."""
        return self._projection_names(f"{self.module}.experts.{index}.")

    def _projection_names(self, prefix: str) -> tuple[tuple[str, ...], str]:
        return tuple(prefix + name for name in self.gate_up), prefix + self.down


def granite_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Granite: experts in all layers."""
    experts = ExpertsConfig(
        num_experts=fields.get_integer("num_local_experts", 8, maximum=_MAX_EXPERTS),
        top_k=fields.get_integer("num_experts_per_tok", 2),
        intermediate_size=fields.get_integer("intermediate_size", maximum=MAX_EXPERT_SIZE),
        renormalize=True,
        module="block_sparse_moe",
        gate="router.layer",
    )
    return _check_experts(experts, layers, fields.where)


def granite_hybrid_experts(fields: ConfigFields, layers: int) -> ExpertsConfig | None:
    """Granite 4: as Granite, plus a shared expert; ``None`` if that is the only one."""
    if not fields.get_count("num_local_experts", 8):
        return None
    is_split = fields.get_boolean("split_shared_mlp", False)
    names = ("gate_proj", "up_proj") if is_split else ("input_linear",)
    return replace(
        granite_experts(fields, layers),
        shared_intermediate_size=fields.get_integer(
            "shared_intermediate_size", 1024, MAX_EXPERT_SIZE
        ),
        shared_names=(
            tuple(f"shared_mlp.{name}" for name in names),
            "shared_mlp.output_linear",
        ),
    )


def mixtral_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Mixtral: as Granite, with other names."""
    return replace(granite_experts(fields, layers), gate="gate", gate_up=("w1", "w3"), down="w2")


def phi_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Phi-3.5-MoE: Mixtral's names, experts chosen one after the other."""
    return replace(
        mixtral_experts(fields, layers),
        renormalize=False,
        scoring="sparsemixer",
        jitter=fields.get_positive("router_jitter_noise", 0.01),
    )


def qwen_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Qwen3-MoE: experts in every ``decoder_sparse_step``-th layer."""
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


def shared_qwen_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Qwen2-MoE: as Qwen3-MoE, plus a shared expert with its own gate."""
    return replace(
        qwen_experts(fields, layers),
        shared_intermediate_size=fields.get_integer(
            "shared_expert_intermediate_size", maximum=MAX_EXPERT_SIZE
        ),
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )


def lfm2_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """LFM2: sigmoid scores with optional corrections; Mixtral's names in another module."""
    experts = ExpertsConfig(
        num_experts=fields.get_integer("num_experts", maximum=_MAX_EXPERTS),
        top_k=fields.get_integer("num_experts_per_tok"),
        intermediate_size=fields.get_integer("moe_intermediate_size", maximum=MAX_EXPERT_SIZE),
        renormalize=fields.get_boolean("norm_topk_prob", True),
        scoring="sigmoid",
        is_corrected=fields.get_boolean("use_expert_bias", True),
        min_sum=1e-6,
        scale=fields.get_positive("routed_scaling_factor", 1.0),
        dense_layers=frozenset(range(min(layers, fields.get_count("num_dense_layers", 2)))),
        module="feed_forward",
        correction="expert_bias",
        gate_up=("w1", "w3"),
        down="w2",
    )
    return _check_experts(experts, layers, fields.where)


def llama4_experts(fields: ConfigFields, layers: int) -> ExpertsConfig | None:
    """Llama 4: one routed expert per row, whose input is scaled by a sigmoid, plus a shared one.

    ``None`` if no layer has experts.
    """
    step = fields.get_integer("interleave_moe_layer_step", 1)
    listed = fields.get_value("moe_layers") is not None
    sparse = fields.get_integers("moe_layers") if listed else range(step - 1, layers, step)
    if fields.get_integer("num_experts_per_tok", 1) != 1:
        raise UnsupportedModel(f"{fields.where}: only 1 is supported as num_experts_per_tok")
    inner = fields.get_integer("intermediate_size", maximum=MAX_EXPERT_SIZE)
    experts = ExpertsConfig(
        num_experts=fields.get_integer("num_local_experts", 16, maximum=_MAX_EXPERTS),
        top_k=1,
        intermediate_size=inner,
        renormalize=False,
        scoring="sigmoid",
        scales_input=True,
        dense_layers=frozenset(range(layers)).difference(sparse),
        module="feed_forward",
        gate="router",
        shared_intermediate_size=inner,
        shared="shared_expert",
    )
    checked = _check_experts(experts, layers, fields.where)
    return checked if len(experts.dense_layers) < layers else None


def gemma4_experts(fields: ConfigFields, layers: int) -> ExpertsConfig | None:
    """Gemma 4: experts in parallel with each layer's MLP; ``None`` without ``enable_moe_block``."""
    if not fields.get_boolean("enable_moe_block", False):
        return None
    inner = fields.get_integer("intermediate_size", maximum=MAX_EXPERT_SIZE)
    experts = ExpertsConfig(
        num_experts=fields.get_integer("num_experts", maximum=_MAX_EXPERTS),
        top_k=fields.get_integer("top_k_experts"),
        intermediate_size=fields.get_integer("moe_intermediate_size", maximum=MAX_EXPERT_SIZE),
        renormalize=True,
        gate="router.proj",
        shared_intermediate_size=inner,
        shared_names=(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
        is_paired=True,
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


def deepseek_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Experts as in DeepSeek-V3: sigmoid scores with corrections and groups, shared experts.

    The first ``first_k_dense_replace`` layers have none.
    """
    inner = fields.get_integer("moe_intermediate_size", maximum=MAX_EXPERT_SIZE)
    shared = fields.get_count("n_shared_experts", 1, _MAX_EXPERTS)
    experts = ExpertsConfig(
        num_experts=fields.get_integer("n_routed_experts", maximum=_MAX_EXPERTS),
        top_k=fields.get_integer("num_experts_per_tok"),
        intermediate_size=inner,
        renormalize=fields.get_boolean("norm_topk_prob", True),
        scoring="sigmoid",
        is_corrected=True,
        has_wide_router=True,
        groups=fields.get_integer("n_group", 1),
        top_groups=fields.get_integer("topk_group", 1),
        min_sum=1e-20,
        scale=fields.get_positive("routed_scaling_factor", 1.0),
        # The layer of the MTP module, which follows the last one, counts as well.
        dense_layers=frozenset(
            range(min(layers + 1, fields.get_count("first_k_dense_replace", 0)))
        ),
        shared_intermediate_size=inner * shared,
    )
    return _check_experts(experts, layers, fields.where)


def kimi_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Kimi Linear: as DeepSeek-V3, with Mixtral's names."""
    module = "block_sparse_moe"
    shared = f"{module}.shared_experts"
    return replace(
        deepseek_experts(fields, layers),
        module=module,
        gate_up=("w1", "w3"),
        down="w2",
        shared_names=((f"{shared}.gate_proj", f"{shared}.up_proj"), f"{shared}.down_proj"),
    )


def deepseek_v2_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Experts as in DeepSeek-V2: softmax scores; a group ranks by its best expert."""
    method = fields.get_string("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"{fields.where}: topk_method {method!r} is not supported")
    if fields.get_boolean("norm_topk_prob", False):
        raise UnsupportedModel(f"{fields.where}: norm_topk_prob is not supported in DeepSeek V2")
    is_grouped = method == "group_limited_greedy"
    experts = replace(
        deepseek_experts(fields, layers),
        renormalize=False,
        scoring="softmax",
        is_corrected=False,
        groups=fields.get_integer("n_group") if is_grouped else 1,
        top_groups=fields.get_integer("topk_group") if is_grouped else 1,
        group_voters=1,
    )
    return _check_experts(experts, layers, fields.where)


def mistral4_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Mistral 4: as DeepSeek-V3, with softmax scores instead of corrected sigmoids."""
    return replace(deepseek_experts(fields, layers), scoring="softmax", is_corrected=False)


def ernie_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """ERNIE 4.5: corrected softmax scores, shared experts, experts in a range of layers."""
    inner = fields.get_integer("moe_intermediate_size", maximum=MAX_EXPERT_SIZE)
    first = fields.get_count("moe_layer_start_index", 1)
    step = fields.get_integer("moe_layer_interval", 1)
    # -1 is the last layer.
    last = fields.get_number("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    experts = ExpertsConfig(
        num_experts=fields.get_integer("moe_num_experts", 64, maximum=_MAX_EXPERTS),
        top_k=fields.get_integer("moe_k", 6),
        intermediate_size=inner,
        renormalize=True,
        is_corrected=True,
        has_wide_router=True,
        min_sum=fields.get_positive("moe_norm_min", 1e-12),
        correction="moe_statics.e_score_correction_bias",
        correction_dims=2,
        dense_layers=frozenset(
            layer for layer in range(layers) if (layer + 1) % step or not first <= layer <= last
        ),
        shared_intermediate_size=inner
        * fields.get_count("moe_num_shared_experts", 2, _MAX_EXPERTS),
    )
    return _check_experts(experts, layers, fields.where)


def nemotron_experts(
    fields: ConfigFields, layers: int, expert_layers: frozenset[int]
) -> ExpertsConfig:
    """Nemotron 3: as DeepSeek-V3, without gates; experts may work on latents."""
    return replace(
        deepseek_experts(fields, layers),
        is_gated=False,
        gate_up=("up_proj",),
        latent_size=fields.get_optional_integer("moe_latent_size", None) or 0,
        dense_layers=frozenset(range(layers)) - expert_layers,
        shared_intermediate_size=fields.get_integer(
            "moe_shared_expert_intermediate_size", 7688, MAX_EXPERT_SIZE
        ),
    )


def minimax_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """MiniMax-M2: Mixtral's names, corrected sigmoid scores."""
    return replace(
        mixtral_experts(fields, layers),
        scoring="sigmoid",
        is_corrected=True,
        has_wide_router=True,
        correction="e_score_correction_bias",
    )


def hunyuan_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Hunyuan: experts in all layers; each shared expert is as wide as a plain MLP."""
    inner = fields.get_integer("intermediate_size", maximum=MAX_EXPERT_SIZE)
    experts = ExpertsConfig(
        num_experts=_get_uniform(fields, "num_experts", 1, _MAX_EXPERTS),
        top_k=_get_uniform(fields, "moe_topk", 1, _MAX_EXPERTS),
        intermediate_size=_get_uniform(fields, "moe_intermediate_size", inner, MAX_EXPERT_SIZE),
        renormalize=True,
        gate="gate.wg",
        has_wide_router=True,
        shared="shared_mlp",
        shared_intermediate_size=inner * _get_uniform(fields, "num_shared_expert", 1, _MAX_EXPERTS),
    )
    return _check_experts(experts, layers, fields.where)


def _get_uniform(fields: ConfigFields, name: str, default: int, maximum: int) -> int:
    """Return a positive integer, which a config may list per layer if all entries are equal."""
    listed = set(fields.get_integers(name)) or {default}
    if len(listed) > 1:
        raise UnsupportedModel(f"{fields.where}: {name} differs between layers")
    return ConfigFields({name: listed.pop()}, fields.where).get_integer(name, maximum=maximum)


def _check_experts(experts: ExpertsConfig, layers: int, where: str) -> ExpertsConfig:
    if experts.top_k > experts.num_experts:
        raise BrokenModel(
            f"{where}: num_experts_per_tok {experts.top_k} exceeds the {experts.num_experts} "
            "experts"
        )
    group_size, rest = divmod(experts.num_experts, experts.groups)
    if experts.groups > 1 and (rest or group_size < experts.group_voters):
        raise BrokenModel(
            f"{where}: {experts.num_experts} experts can't be divided into n_group "
            f"{experts.groups} groups of {experts.group_voters} or more"
        )
    if experts.top_groups > experts.groups:
        raise BrokenModel(
            f"{where}: topk_group {experts.top_groups} exceeds n_group {experts.groups}"
        )
    if experts.top_k > experts.top_groups * group_size:
        raise BrokenModel(
            f"{where}: num_experts_per_tok {experts.top_k} exceeds the experts of topk_group "
            f"{experts.top_groups} groups"
        )
    if experts.num_experts * layers > _MAX_EXPERTS_OF_MODEL:
        raise BrokenModel(
            f"{where}: num_experts {experts.num_experts} in {layers} layers are over "
            f"{_MAX_EXPERTS_OF_MODEL} experts"
        )
    return experts
