"""One decoder layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.experts import ExpertsConfig
from molink.checkpoint.recurrent import (
    ChannelDeltaShape,
    DeltaRuleShape,
    Mamba2Shape,
    ShortConvShape,
)
from molink.checkpoint.tensor_layout import (
    EXPERT_SCALES_NAME,
    LAYER_SCALE_NAME,
    PAIRED_NORMS,
    ROUTER_SCALE_NAME,
    mlp_projections,
)
from molink.stage.decoder.channel_delta import load_channel_delta
from molink.stage.decoder.delta_net import load_delta_net
from molink.stage.decoder.expert_mlp import ExpertList, ExpertMlp
from molink.stage.decoder.expert_use import ExpertUse
from molink.stage.decoder.grouped_experts import GroupedExpertMlp, GroupedExperts
from molink.stage.decoder.mamba2 import load_mamba2
from molink.stage.decoder.mixer import ForwardContext, Mixer
from molink.stage.decoder.mlp import (
    BoundedGate,
    GatedMlp,
    LatentExpertMlp,
    Mlp,
    SharedExpertMlp,
    run_mlp,
)
from molink.stage.decoder.norm import (
    AddResidual,
    Float32RmsNorm,
    IdentityNorm,
    LayerNorm,
    Norm,
)
from molink.stage.decoder.operators import RowOperators
from molink.stage.decoder.paired_mlp import PairedMlp
from molink.stage.decoder.parallel import ParallelMixers, ParallelMlp
from molink.stage.decoder.router import ExpertRouter
from molink.stage.decoder.scaled import scale_outputs
from molink.stage.decoder.self_attention import load_attention
from molink.stage.decoder.short_conv import load_short_conv
from molink.stage.decoder.sparse_attention import load_sparse_attention
from molink.stage.decoder.split_experts import ReloadExperts, SharedSplitMlp, SplitExpertMlp
from molink.stage.decoder.weight_source import OpenedWeights, WeightSource
from molink.stage.linear import ExpertLinear, PlainLinear, Projection
from molink.stage.torch_dtypes import residual_dtype
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Weights of one layer.

    ``scale`` multiplies the outputs of mixer and MLP, ``layer_scale`` the layer's output. Without
    an ``mlp``, only ``input_norm`` and ``post_mlp_norm`` surround the mixer.
    """

    scale: float
    input_norm: Norm
    mixer: Mixer
    post_attention_norm: Norm
    mlp_norm: Norm
    mlp: Mlp | None
    post_mlp_norm: Norm
    add_residual: AddResidual
    layer_scale: float = 1.0

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture it."""
        return self.mixer.capturable and (self.mlp is None or self.mlp.capturable)

    @property
    def split_experts(self) -> SplitExpertMlp | None:
        """The layer's experts, if some are in host memory."""
        mixer, mlp = self.mixer, self.mlp
        found = mixer.mlp if isinstance(mixer, ParallelMlp) else mlp
        routed = found.routed if isinstance(found, SharedExpertMlp | PairedMlp) else found
        routed = routed.routed if isinstance(routed, LatentExpertMlp) else routed
        return routed if isinstance(routed, SplitExpertMlp) else None

    @property
    def nbytes(self) -> int:
        norms = (self.input_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        parts = (*norms, self.mixer, self.mlp)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class AddedRows:
    """Rows to add to the step's rows ``indices`` (int64 ``[n]``) after each of the first layers.

    ``layers`` has rows ``[n, hidden]`` for each of these layers.
    """

    indices: Tensor
    layers: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class HostExperts:
    """How many experts per layer lie in host memory, and how they are loaded.

    ``sources`` reload experts that later move to the device or to the host; ``None`` if both keep
    experts in the same form.
    """

    count: int
    weights: OpenedWeights
    sources: tuple[WeightSource, WeightSource] | None


def run_blocks(
    blocks: Sequence[DecoderBlock],
    rows: Tensor,
    context: ForwardContext,
    between_layers: Callable[[], None] | None = None,
    added: AddedRows | None = None,
) -> Tensor:
    """Run rows ``[T, hidden]`` through layers; call ``between_layers`` after each but the last.

    Each residual addition and the norm after it, even the next layer's, are one operator. Variables
    are reused so that no tensor outlives its use.
    """
    normed = blocks[0].input_norm(rows)
    next_norms = (*(block.input_norm for block in blocks[1:]), IdentityNorm(rows.dtype))
    for layer, (block, next_norm) in enumerate(zip(blocks, next_norms, strict=True)):
        normed = block.mixer(normed, context)
        if block.mlp is not None:
            rows, normed = block.add_residual(
                rows, normed, block.scale, block.post_attention_norm, block.mlp_norm
            )
            normed = run_mlp(block.mlp, normed, context.adapters)
        extra = None
        if added is not None and layer < len(added.layers):
            extra = added.indices, added.layers[layer]
        rows, normed = _finish_block(block, rows, normed, next_norm, extra)
        if between_layers is not None and block is not blocks[-1]:
            between_layers()
    return rows


def _finish_block(
    block: DecoderBlock,
    rows: Tensor,
    result: Tensor,
    next_norm: Norm,
    extra: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a layer's last ``result`` to the rows; return the rows before and after the next norm.

    ``extra`` has the indices of some rows and the rows to add to these.
    """
    if block.layer_scale == 1.0 and extra is None:
        return block.add_residual(rows, result, block.scale, block.post_mlp_norm, next_norm)
    unnormed = IdentityNorm(rows.dtype)
    rows, _ = block.add_residual(rows, result, block.scale, block.post_mlp_norm, unnormed)
    rows = rows if block.layer_scale == 1.0 else rows.mul_(block.layer_scale)
    rows = rows if extra is None else rows.index_add_(0, *extra)
    return rows, next_norm(rows)


def load_block(
    reader: WeightReader,
    config: ModelConfig,
    operators: RowOperators,
    layer: int,
    index: int,
    host: HostExperts | None = None,
) -> DecoderBlock:
    """Load the model's layer ``layer``, the ``index``-th of its kind in the stage."""
    prefix, norms = config.layer_prefix(layer), config.layer_norms(layer)

    def norm(name: str | None, otherwise: torch.dtype = reader.dtype) -> Norm:
        if name is None:
            return IdentityNorm(otherwise)
        return load_norm(reader, config, operators, prefix + name)

    mixer, mlp = _load_parts(reader, config, operators, layer, index, host)
    return DecoderBlock(
        scale=config.residual_scale,
        input_norm=norm(norms.before_attention),
        mixer=mixer,
        post_attention_norm=norm(norms.after_attention),
        mlp_norm=norm(norms.before_mlp, _mlp_input_dtype(reader, config, layer)),
        mlp=mlp,
        post_mlp_norm=norm(norms.after_mlp, residual_dtype(reader.dtype)),
        add_residual=operators.add_residual,
        layer_scale=float(reader.read_tensors(prefix + LAYER_SCALE_NAME))
        if config.scaled_layers
        else 1.0,
    )


def _load_parts(
    reader: WeightReader,
    config: ModelConfig,
    operators: RowOperators,
    layer: int,
    index: int,
    host: HostExperts | None,
) -> tuple[Mixer, Mlp | None]:
    """Load a layer's mixer and MLP; an MLP that is parallel or alone is part of the mixer."""
    prefix, mixer = config.layer_prefix(layer), None
    if layer not in (config.mlp_layers or ()):
        mixer = _load_mixer(reader, config, operators, layer, index)
        if not config.has_mlp(layer):
            return mixer, None
    mlp = _load_mlp(reader, config, operators, layer, prefix, host)
    if mixer is None or config.parallel_mlp:
        return ParallelMlp(mixer, mlp), None
    return mixer, mlp


def load_norm(
    reader: WeightReader, config: ModelConfig, operators: RowOperators, name: str
) -> Norm:
    """Load the norm whose tensor names begin with ``name``."""
    weight = reader.read_tensors(f"{name}.weight")
    if config.norm_kind == "rms":
        return operators.norm(weight)
    is_biased = config.norm_kind == "biased layer"
    bias = reader.read_tensors(f"{name}.bias").float() if is_biased else None
    return LayerNorm(weight.float(), bias, config.norm_eps, reader.dtype)


def _load_mixer(
    reader: WeightReader, config: ModelConfig, operators: RowOperators, layer: int, index: int
) -> Mixer:
    attention: Mixer | None = None
    if config.has_attention(layer):
        append, latent = operators.append_heads, config.latent
        if latent is not None and latent.index is not None:
            attention = load_sparse_attention(reader, config, latent, append, layer, index)
        else:
            attention = load_attention(reader, config, append, layer, index)
    recurrent = _load_recurrent(reader, config, layer, index)
    if attention is None or recurrent is None:
        mixer = attention or recurrent
        assert mixer is not None, "a layer without a mixer is an MLP"
        return mixer
    return ParallelMixers(attention, recurrent)


def _load_recurrent(
    reader: WeightReader, config: ModelConfig, layer: int, index: int
) -> Mixer | None:
    if layer in config.recurrent_layers:
        match config.recurrent:
            case DeltaRuleShape() as shape:
                return load_delta_net(reader, config, shape, layer, index)
            case ChannelDeltaShape() as shape:
                return load_channel_delta(reader, config, shape, layer, index)
            case Mamba2Shape() as shape:
                return load_mamba2(reader, config, shape, layer, index)
            case ShortConvShape() as shape:
                return load_short_conv(reader, shape, layer, index)
    return None


def _load_mlp(
    reader: WeightReader,
    config: ModelConfig,
    operators: RowOperators,
    layer: int,
    prefix: str,
    host: HostExperts | None,
) -> Mlp:
    experts = config.layer_experts(layer)
    loader = _MlpLoader(reader, config, operators, prefix)
    if experts is None:
        plain = loader.load_gated(*mlp_projections(config), config.mlp_bias)
        if config.output_factors is None:
            return plain
        factors, sizes = config.output_factors.gate_up, [config.intermediate_size] * 2
        return replace(plain, gate_up=scale_outputs(plain.gate_up, sizes, factors, reader))
    router = _load_router(loader, experts)
    split = None if host is None else _load_split(loader, experts, router, host)
    chosen: Mlp
    if split is not None:
        chosen = split
    else:
        group = loader.load_group(experts, range(experts.num_experts))
        if isinstance(group, GroupedExperts):
            chosen = GroupedExpertMlp(router, group)
        else:
            chosen = ExpertMlp(router, group)
    if experts.latent_size:
        output = reader.load_projection([prefix + experts.latent_names[1]], False)
        chosen, split = LatentExpertMlp(chosen, output), None
    if experts.is_paired:
        return _pair_mlps(loader, experts, chosen)
    if not experts.shared_intermediate_size:
        return chosen
    name = experts.shared_gate_name
    weigh = None if name is None else PlainLinear(reader.read_tensors(f"{prefix}{name}.weight"))
    shared = loader.load_gated(*experts.shared_projections, False)
    if split is not None:
        return SharedSplitMlp(split, shared, weigh)
    return SharedExpertMlp(chosen, shared, weigh)


def _mlp_input_dtype(reader: WeightReader, config: ModelConfig, layer: int) -> torch.dtype:
    """Return the type of rows that an MLP without a norm before it reads.

    An MLP that starts with its own norms reads the residual's type.
    """
    experts = config.layer_experts(layer)
    is_paired = experts is not None and experts.is_paired
    return residual_dtype(reader.dtype) if is_paired else reader.dtype


def _pair_mlps(loader: "_MlpLoader", experts: ExpertsConfig, routed: Mlp) -> PairedMlp:
    """Load an MLP in parallel to experts; the router contains the norm before the experts."""
    before, after, _, routed_after = (loader.load_norm(name) for name in PAIRED_NORMS)
    shared = loader.load_gated(*experts.shared_projections, False)
    return PairedMlp(before, shared, after, routed, routed_after)


def _load_split(
    loader: "_MlpLoader", experts: ExpertsConfig, router: ExpertRouter, host: HostExperts
) -> SplitExpertMlp:
    """Load a layer's experts, the last ones into host memory."""
    resident = experts.num_experts - host.count
    beside = replace(loader, reader=host.weights.reader, operators=host.weights.operators)
    is_bounded = loader.bounded_gate(experts.has_bias) is not None
    return SplitExpertMlp(
        router,
        loader.load_group(experts, range(resident)),
        beside.load_list(experts, range(resident, experts.num_experts)),
        ranks=torch.arange(experts.num_experts),
        use=ExpertUse(experts.num_experts, resident),
        reload=None if host.sources is None else loader.make_reload(experts, *host.sources),
        host_dtype=host.weights.reader.dtype,
        result_dtype=torch.float32 if is_bounded else loader.reader.dtype,
    )


@dataclass(frozen=True, slots=True)
class _MlpLoader:
    """Loads MLPs of one layer, whose tensors begin with ``prefix``."""

    reader: WeightReader
    config: ModelConfig
    operators: RowOperators
    prefix: str

    def load_norm(self, name: str) -> Norm:
        """Load a norm."""
        return load_norm(self.reader, self.config, self.operators, self.prefix + name)

    def load_gated(self, names: Sequence[str], down: str, biased: bool) -> GatedMlp:
        """Load one MLP."""
        return GatedMlp(
            gate_up=self.reader.load_projection([self.prefix + name for name in names], biased),
            down=self.reader.load_projection([self.prefix + down], biased),
            gate=self.operators.gate,
            bounded_gate=self.bounded_gate(biased),
        )

    def bounded_gate(self, biased: bool) -> BoundedGate | None:
        """Return the gate that keeps rows within float16's range, if it is needed."""
        scales = self.reader.dtype == torch.float16 and self.config.dtype != "f16"
        return self.operators.bounded_gate if scales and not biased else None

    def load_group(
        self, experts: ExpertsConfig, indices: Sequence[int]
    ) -> ExpertList | GroupedExperts:
        """Load some experts, stacked if the device multiplies by all at once."""
        stacked = self._load_stacked(experts, indices)
        if stacked is None:
            return self.load_list(experts, indices)
        gate = self.operators.gate
        return GroupedExperts(*stacked, gate, self.bounded_gate(experts.has_bias))

    def make_reload(
        self, experts: ExpertsConfig, near: WeightSource, far: WeightSource
    ) -> ReloadExperts:
        """Return a function that loads one expert for the device and another for host memory."""
        config, prefix = self.config, self.prefix

        def reload(moved: int, expelled: int) -> tuple[ExpertList | GroupedExperts, Mlp]:
            with near.open_weights() as device, far.open_weights() as host:
                loaders = (
                    _MlpLoader(one.reader, config, one.operators, prefix) for one in (device, host)
                )
                to_device, to_host = loaders
                group = to_device.load_group(experts, [moved])
                (other,) = to_host.load_list(experts, [expelled]).experts
            return group, other

        return reload

    def load_list(self, experts: ExpertsConfig, indices: Sequence[int]) -> ExpertList:
        """Load some experts one by one."""
        names = map(experts.expert_projections, indices)
        return ExpertList([self.load_gated(both, down, experts.has_bias) for both, down in names])

    def _load_stacked(
        self, experts: ExpertsConfig, indices: Sequence[int]
    ) -> tuple[ExpertLinear, ExpertLinear] | None:
        names = [experts.expert_projections(index) for index in indices]
        if not names:
            return None
        gate_up = self.reader.load_experts(
            [[self.prefix + name for name in both] for both, _ in names], experts.has_bias, experts
        )
        if gate_up is None:
            return None
        down = self.reader.load_experts(
            [[self.prefix + name] for _, name in names], experts.has_bias, experts
        )
        return None if down is None else (gate_up, down)


def _load_router(loader: "_MlpLoader", experts: ExpertsConfig) -> ExpertRouter:
    """Load a router, never quantized: small errors would change the chosen experts."""
    reader, prefix = loader.reader, loader.prefix
    name, correction = f"{prefix}{experts.router_name}", None
    if experts.is_corrected:
        stored = reader.read_tensors(prefix + experts.correction_name, dtype=torch.float32)
        correction = stored.flatten()
    if experts.has_wide_router:
        names = [f"{name}.weight", f"{name}.bias"][: 1 + experts.has_bias]
        projection: Projection = PlainLinear(
            *(reader.read_tensors(each, dtype=torch.float32) for each in names)
        )
    else:
        projection = reader.load_unquantized(name, experts.has_bias)
    made = ExpertRouter(projection, experts, correction, experts.has_wide_router)
    if experts.latent_size:
        entry = reader.load_projection([prefix + experts.latent_names[0]], False)
        return replace(made, entry=entry)
    if not experts.is_paired:
        return made
    width = loader.config.hidden_size
    scale = reader.read_tensors(prefix + ROUTER_SCALE_NAME, dtype=torch.float32)
    return replace(
        made,
        entry=loader.load_norm(PAIRED_NORMS[2]),
        norm=Float32RmsNorm(scale.mul_(width**-0.5), loader.config.norm_eps, reader.dtype),
        expert_scales=reader.read_tensors(prefix + EXPERT_SCALES_NAME, dtype=torch.float32),
    )
