"""Layers that keep a recurrent state of each request instead of keys and values."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import inf, prod

from molink.checkpoint.config_fields import ConfigFields
from molink.errors import BrokenModel, UnsupportedModel
from molink.facts.drafts import MAX_DRAFTS

_FULL = "full_attention"
#: Granite's names of layer kinds.
_OLD_KINDS = {"attention": _FULL, "mamba": "linear_attention"}
#: Nemotron's layer kinds: letters in its pattern, and other spellings in lists.
_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_KINDS = {"linear_attention": "mamba", _FULL: "attention"}
#: Name of the list of layer kinds.
_LAYER_TYPES = "layer_types"
#: Field of Kimi Linear's delta-rule settings.
_LINEAR_CONFIG = "linear_attn_config"
#: Limits for damaged configs.
_MAX_HEADS = 1024
_MAX_DIM = 1024
_MAX_WIDTH = 64
#: Spellings that mean no limits.
_NO_LIMITS = ([0.0, inf], [0.0, {"__float__": "Infinity"}])


class RecurrentShape(ABC):
    """Dimensions of a recurrent layer, and names of its tensors.

    Each layer begins with a causal convolution, whose last rows are part of the state; the
    recurrence after it may keep more.
    """

    __slots__ = ()

    #: Whether projections have biases.
    is_biased: bool

    #: Rows that the convolution covers.
    conv_width: int

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of the convolution."""

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Shape of the convolution's state: past rows that it still needs, and channels."""
        return self.conv_width - 1, self.channels

    @property
    @abstractmethod
    def memory_shape(self) -> tuple[int, ...]:
        """Shape of the rest of a request's state in a layer."""

    @property
    @abstractmethod
    def projections(self) -> dict[str, int]:
        """Names of projections of a row that are merged into one, with their output sizes."""

    @property
    def rate_projections(self) -> dict[str, int]:
        """Projections of a row to rates and decays, with output sizes.

        They are never quantized, since their errors add up over rows.
        """
        return {}

    @property
    def inner_projections(self) -> dict[str, tuple[int, int]]:
        """Projections of other projections' outputs, with output and input sizes."""
        return {}

    @property
    @abstractmethod
    def output_projection(self) -> tuple[str, int]:
        """Name and input size of the projection back to rows."""

    @property
    @abstractmethod
    def small_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors."""

    @property
    @abstractmethod
    def row_elements(self) -> tuple[int, int]:
        """Peak number of elements per row: in the compute type, and in float32."""

    @property
    def state_elements(self) -> int:
        """Elements of a request's state in a layer."""
        return prod(self.conv_shape) + prod(self.memory_shape)

    @property
    def input_size(self) -> int:
        """Elements of a row that change the state: convolved channels, rates and decays."""
        return self.channels + sum(self.rate_projections.values())

    @property
    def drafts_shape(self) -> tuple[int, int]:
        """Shape of a request's latest drafts in a layer: rows, and what they would change it by."""
        return MAX_DRAFTS, self.input_size

    @property
    def slot_elements(self) -> int:
        """Elements of a request's slot in a layer: its state and its latest drafts."""
        return self.state_elements + prod(self.drafts_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleShape(RecurrentShape):
    """The gated delta rule (Gated DeltaNet, arXiv 2412.06464, §3) behind a causal convolution.

    There are ``key_heads`` queries and keys of size ``key_dim`` and ``value_heads`` values of size
    ``value_dim``; consecutive values share a key. Queries, keys and values are the channels of a
    convolution over ``conv_width`` rows. With ``grouped_rows`` one projection computes them and the
    gates, ordered by key heads; otherwise gates have their own projection. With ``grouped_rates``
    one projection computes rates and decays; otherwise there are two. With ``has_own_names`` (OLMo
    Hybrid) queries, keys and values each have their own projection and convolution. Rates are
    multiplied by ``rate_scale``. ``norm_eps`` is the epsilon of the output norm, if it differs from
    the model's. Tensors of GGUF files may differ: with ``is_tiled`` the values that share a key are
    ``key_heads`` apart, and with ``has_decays`` a tensor holds the decays instead of their
    logarithms.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    grouped_rows: bool = False
    grouped_rates: bool = False
    is_tiled: bool = False
    has_decays: bool = False
    has_own_names: bool = False
    rate_scale: float = 1.0
    norm_eps: float | None = None
    is_biased: bool = False

    @property
    def groups(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def keys_size(self) -> int:
        """Elements of a row's keys."""
        return self.key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Elements of a row's values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Shape of the sums of outer products of keys and values."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def projections(self) -> dict[str, int]:
        """Queries, keys, values and gates."""
        if self.has_own_names:
            return {
                "linear_attn.q_proj": self.keys_size,
                "linear_attn.k_proj": self.keys_size,
                "linear_attn.v_proj": self.values_size,
                "linear_attn.g_proj": self.values_size,
            }
        if self.grouped_rows:
            return {"linear_attn.in_proj_qkvz": self.channels + self.values_size}
        return {
            "linear_attn.in_proj_qkv": self.channels,
            "linear_attn.in_proj_z": self.values_size,
        }

    @property
    def rate_projections(self) -> dict[str, int]:
        """Rates and decays."""
        if self.grouped_rates:
            return {"linear_attn.in_proj_ba": 2 * self.value_heads}
        prefix = "linear_attn." if self.has_own_names else "linear_attn.in_proj_"
        end = "_proj" if self.has_own_names else ""
        return dict.fromkeys((f"{prefix}b{end}", f"{prefix}a{end}"), self.value_heads)

    @property
    def output_projection(self) -> tuple[str, int]:
        """See :class:`RecurrentShape`."""
        return f"linear_attn.{'o' if self.has_own_names else 'out'}_proj", self.values_size

    @property
    def small_tensors(self) -> dict[str, tuple[int, ...]]:
        """The convolution, decays or their logarithms, biases of their exponents, and a norm."""
        decays = "linear_attn.A" if self.has_decays else "linear_attn.A_log"
        convolved = {
            f"{name}.weight": (channels, 1, self.conv_width)
            for name, channels in self.convolutions.items()
        }
        return convolved | {
            decays: (self.value_heads,),
            "linear_attn.dt_bias": (self.value_heads,),
            f"{self.norm_name}.weight": (self.value_dim,),
        }

    @property
    def convolutions(self) -> dict[str, int]:
        """Convolutions of a row that are merged into one, and their channels."""
        if not self.has_own_names:
            return {"linear_attn.conv1d": self.channels}
        sizes = (("q", self.keys_size), ("k", self.keys_size), ("v", self.values_size))
        return {f"linear_attn.{part}_conv1d": size for part, size in sizes}

    @property
    def norm_name(self) -> str:
        """Name of the norm of rows read from the state."""
        return f"linear_attn.{'o_norm' if self.has_own_names else 'norm'}"

    @property
    def row_elements(self) -> tuple[int, int]:
        """Projected rows twice.

        Convolved channels three times (with the rows before, cast, and their result), queries and
        keys of all value heads twice, and what heads read three times, with their gates.
        """
        spread = 2 * self.value_heads * self.key_dim
        wide = 3 * self.channels + 2 * spread + 4 * self.values_size
        return 2 * (self.channels + self.values_size), wide


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDeltaShape(RecurrentShape):
    """The delta rule whose decays differ by channel of the keys (Kimi Delta Attention, arXiv
    2510.26692, §3), behind convolutions of ``conv_width`` rows.

    There are ``heads`` queries, keys and values of ``dim``. Decays and gates are projected through
    ``dim`` dimensions.
    """

    heads: int
    dim: int
    conv_width: int
    is_biased: bool = False

    @property
    def size(self) -> int:
        """Elements of a row's keys."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 3 * self.size

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Shape of the sums of outer products of keys and values."""
        return self.heads, self.dim, self.dim

    @property
    def projections(self) -> dict[str, int]:
        """Queries, keys, values, and what gates are projected from."""
        heads = dict.fromkeys((f"self_attn.{part}_proj" for part in "qkv"), self.size)
        return heads | {"self_attn.g_a_proj": self.dim}

    @property
    def rate_projections(self) -> dict[str, int]:
        """Rates, and what decays are projected from."""
        return {"self_attn.b_proj": self.heads, "self_attn.f_a_proj": self.dim}

    @property
    def inner_projections(self) -> dict[str, tuple[int, int]]:
        """Gates and decays."""
        return dict.fromkeys((self.gate_name, self.decay_name), (self.size, self.dim))

    @property
    def gate_name(self) -> str:
        """Name of the projection to gates."""
        return "self_attn.g_b_proj"

    @property
    def decay_name(self) -> str:
        """Name of the projection to decays."""
        return "self_attn.f_b_proj"

    @property
    def output_projection(self) -> tuple[str, int]:
        """See :class:`RecurrentShape`."""
        return "self_attn.o_proj", self.size

    @property
    def convolutions(self) -> tuple[str, ...]:
        """Convolutions of a row that are merged into one."""
        return tuple(f"self_attn.{part}_conv1d" for part in "qkv")

    @property
    def small_tensors(self) -> dict[str, tuple[int, ...]]:
        """Convolutions, logarithms of decays, biases of their exponents, and a norm."""
        convolved = {
            f"{name}.weight": (self.size, 1, self.conv_width) for name in self.convolutions
        }
        return convolved | {
            "self_attn.A_log": (1, 1, self.heads, 1),
            "self_attn.dt_bias": (self.size,),
            "self_attn.o_norm.weight": (self.dim,),
        }

    @property
    def row_elements(self) -> tuple[int, int]:
        """Projected rows twice, with gates and decays.

        Convolved channels three times (with the rows before, cast, and their result), queries and
        keys twice, decays three times, and what heads read three times, with their gates.
        """
        return 2 * (self.channels + 2 * self.size), 3 * self.channels + 11 * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvShape(RecurrentShape):
    """A gated convolution of ``conv_width`` rows over ``channels`` channels (LFM2).

    A row is projected to two gates and to what is convolved: one before, the other after.
    """

    channels: int
    conv_width: int
    is_biased: bool = False

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Nothing."""
        return (0,)

    @property
    def projections(self) -> dict[str, int]:
        """The gate before, the gate after, and what is convolved."""
        return {"conv.in_proj": 3 * self.channels}

    @property
    def output_projection(self) -> tuple[str, int]:
        """See :class:`RecurrentShape`."""
        return "conv.out_proj", self.channels

    @property
    def small_tensors(self) -> dict[str, tuple[int, ...]]:
        """The convolution."""
        weight: dict[str, tuple[int, ...]] = {
            "conv.conv.weight": (self.channels, 1, self.conv_width)
        }
        return weight | ({"conv.conv.bias": (self.channels,)} if self.is_biased else {})

    @property
    def row_elements(self) -> tuple[int, int]:
        """The projected row and a gated one; that, with the rows before, and the result twice."""
        return 5 * self.channels, 4 * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape(RecurrentShape):
    """Mamba-2 (arXiv 2405.21060) behind a causal convolution of ``conv_width`` rows.

    There are ``heads`` values of ``head_dim`` (x there); each of ``groups`` queries and keys (C and
    B) of ``state_size`` serves the same number of consecutive heads. With ``has_decays`` (from a
    GGUF file) a tensor has the decays themselves. What is read is normed if it ``has_norm``.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_width: int
    has_conv_bias: bool = True
    has_norm: bool = True
    has_decays: bool = False
    is_biased: bool = False

    @property
    def inner_size(self) -> int:
        """Elements of a row's values, and of its gates."""
        return self.heads * self.head_dim

    @property
    def row_sizes(self) -> tuple[int, int, int, int, int]:
        """Outputs of the projection: gates, values, keys, queries and steps."""
        keys = self.groups * self.state_size
        return self.inner_size, self.inner_size, keys, keys, self.heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Shape of the sums of outer products of keys and values."""
        return self.heads, self.state_size, self.head_dim

    @property
    def projections(self) -> dict[str, int]:
        """Gates, channels and steps, which have no projection of their own."""
        return {"mamba.in_proj": self.inner_size + self.channels + self.heads}

    @property
    def input_size(self) -> int:
        """Convolved channels and steps."""
        return self.channels + self.heads

    @property
    def output_projection(self) -> tuple[str, int]:
        """See :class:`RecurrentShape`."""
        return "mamba.out_proj", self.inner_size

    @property
    def small_tensors(self) -> dict[str, tuple[int, ...]]:
        """The convolution, logarithms of decays, weights of the skip, biases of steps, a norm."""
        shapes: dict[str, tuple[int, ...]] = {
            "mamba.conv1d.weight": (self.channels, 1, self.conv_width),
        }
        if self.has_norm:
            shapes["mamba.norm.weight"] = (self.inner_size,)
        decays = "mamba.A" if self.has_decays else "mamba.A_log"
        shapes |= dict.fromkeys((decays, "mamba.D", "mamba.dt_bias"), (self.heads,))
        return shapes | ({"mamba.conv1d.bias": (self.channels,)} if self.has_conv_bias else {})

    @property
    def row_elements(self) -> tuple[int, int]:
        """The projected row twice.

        Convolved channels three times (with the rows before, cast, and their result), queries and
        keys of all heads, and values four times (as they are, by their steps, read, and normed).
        """
        spread = 2 * self.heads * self.state_size
        wide = 3 * self.channels + spread + 4 * self.inner_size
        return 2 * (self.inner_size + self.channels + self.heads), wide


def parse_delta_rule(fields: ConfigFields, *, is_grouped: bool) -> DeltaRuleShape:
    """Parse the dimensions of layers with ``linear_attention``.

    Raises:
        BrokenModel: a field is missing or invalid.
    """
    shape = DeltaRuleShape(
        key_heads=fields.get_integer("linear_num_key_heads", 16, _MAX_HEADS),
        value_heads=fields.get_integer("linear_num_value_heads", 32, _MAX_HEADS),
        key_dim=fields.get_integer("linear_key_head_dim", 128, _MAX_DIM),
        value_dim=fields.get_integer("linear_value_head_dim", 128, _MAX_DIM),
        conv_width=fields.get_integer("linear_conv_kernel_dim", 4, _MAX_WIDTH),
        grouped_rows=is_grouped and not fields.get_boolean("linear_split_rows", False),
        grouped_rates=is_grouped,
        # From a GGUF file, as the one above.
        is_tiled=fields.get_boolean("linear_tiled_values", False),
        has_decays=fields.get_boolean("linear_plain_decays", False),
    )
    return _check_value_heads(shape, fields)


def parse_olmo_delta_rule(fields: ConfigFields) -> DeltaRuleShape:
    """The same of OLMo Hybrid, with other defaults.

    Raises:
        BrokenModel: a field is missing or invalid.
    """
    heads = fields.get_integer("num_attention_heads", maximum=_MAX_HEADS)
    keys = fields.get_integer("linear_num_key_heads", heads, _MAX_HEADS)
    share = max(1, int(0.75 * fields.get_integer("hidden_size") / keys))
    key_dim = fields.get_integer("linear_key_head_dim", share, _MAX_DIM)
    shape = DeltaRuleShape(
        key_heads=keys,
        value_heads=fields.get_integer("linear_num_value_heads", heads, _MAX_HEADS),
        key_dim=key_dim,
        value_dim=fields.get_integer("linear_value_head_dim", 2 * key_dim, _MAX_DIM),
        conv_width=fields.get_integer("linear_conv_kernel_dim", 4, _MAX_WIDTH),
        has_own_names=True,
        rate_scale=2.0 if fields.get_boolean("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )
    return _check_value_heads(shape, fields)


def _check_value_heads(shape: DeltaRuleShape, fields: ConfigFields) -> DeltaRuleShape:
    if shape.value_heads % shape.key_heads:
        raise BrokenModel(
            f"{fields.where}: linear_num_value_heads {shape.value_heads} is not a multiple of "
            f"linear_num_key_heads {shape.key_heads}"
        )
    return shape


def parse_channel_delta(fields: ConfigFields) -> ChannelDeltaShape:
    """Parse the dimensions of Kimi Linear's layers with ``linear_attention``.

    Raises:
        BrokenModel: a field is invalid.
    """
    listed = fields.get_object(_LINEAR_CONFIG)
    inner = ConfigFields(listed, f"{fields.where}: {_LINEAR_CONFIG}")
    width = fields.get_integer("linear_conv_kernel_dim", 4, _MAX_WIDTH)
    return ChannelDeltaShape(
        heads=inner.get_integer(
            "num_heads", fields.get_integer("linear_num_heads", 32, _MAX_HEADS), _MAX_HEADS
        ),
        dim=inner.get_integer(
            "head_dim", fields.get_integer("linear_head_dim", 128, _MAX_DIM), _MAX_DIM
        ),
        conv_width=inner.get_integer("short_conv_kernel_size", width, _MAX_WIDTH),
    )


def parse_short_conv(fields: ConfigFields) -> ShortConvShape:
    """Parse the dimensions of layers with a short convolution.

    Raises:
        BrokenModel: a field is missing or invalid.
    """
    return ShortConvShape(
        channels=fields.get_integer("hidden_size"),
        conv_width=fields.get_integer("conv_L_cache", 3, _MAX_WIDTH),
        is_biased=fields.get_boolean("conv_bias", False),
    )


def parse_mamba2(fields: ConfigFields) -> Mamba2Shape:
    """Parse the dimensions of Mamba-2 layers.

    Raises:
        UnsupportedModel: steps have limits.
        BrokenModel: a field is missing or invalid.
    """
    return _parse_sized_mamba2(fields, _expanded_size(fields), "mamba_expand times hidden_size")


def parse_nemotron_mamba2(fields: ConfigFields) -> Mamba2Shape:
    """The same by Nemotron's names; raises as :func:`parse_mamba2`."""
    shape = Mamba2Shape(
        heads=fields.get_integer("mamba_num_heads", 128, _MAX_HEADS),
        head_dim=fields.get_integer("mamba_head_dim", 64, _MAX_DIM),
        groups=fields.get_integer("n_groups", 8, _MAX_HEADS),
        state_size=fields.get_integer("ssm_state_size", 128, _MAX_DIM),
        conv_width=fields.get_integer("conv_kernel", 4, _MAX_WIDTH),
        has_conv_bias=fields.get_boolean("use_conv_bias", True),
        has_decays=fields.get_boolean("mamba_plain_decays", False),
        is_biased=fields.get_boolean("use_bias", False),
    )
    _check_groups(shape, fields, "mamba_num_heads", "n_groups")
    return shape


def parse_falcon_mamba2(fields: ConfigFields) -> Mamba2Shape:
    """The same of Falcon-H1; raises as :func:`parse_mamba2`."""
    inner, stated = fields.get_optional_integer("mamba_d_ssm", 1024), "mamba_d_ssm"
    if inner is None:
        inner, stated = _expanded_size(fields), "mamba_expand times hidden_size"
    shape = _parse_sized_mamba2(fields, inner, stated)
    has_norm = fields.get_boolean("mamba_rms_norm", False)
    if has_norm and fields.get_boolean("mamba_norm_before_gate", True):
        raise UnsupportedModel(f"{fields.where}: mamba_norm_before_gate is not supported")
    if shape.is_biased != fields.get_boolean("projectors_bias", False):
        raise UnsupportedModel(
            f"{fields.where}: mamba_proj_bias and projectors_bias differ, which is not supported"
        )
    return replace(shape, has_norm=has_norm)


def _expanded_size(fields: ConfigFields) -> int:
    return fields.get_integer("mamba_expand", 2, _MAX_DIM) * fields.get_integer("hidden_size")


def _parse_sized_mamba2(fields: ConfigFields, inner: int, stated: str) -> Mamba2Shape:
    """Parse Mamba-2 whose values have ``inner`` elements, by the fields that ``stated`` names."""
    heads = fields.get_integer("mamba_n_heads", 128, _MAX_HEADS)
    is_derived = fields.get_value("mamba_d_head") in (None, "auto")
    shape = Mamba2Shape(
        heads=heads,
        head_dim=max(1, inner // heads) if is_derived else fields.get_integer("mamba_d_head"),
        groups=fields.get_integer("mamba_n_groups", 1, _MAX_HEADS),
        state_size=fields.get_integer("mamba_d_state", 256, _MAX_DIM),
        conv_width=fields.get_integer("mamba_d_conv", 4, _MAX_WIDTH),
        has_conv_bias=fields.get_boolean("mamba_conv_bias", True),
        has_decays=fields.get_boolean("mamba_plain_decays", False),
        is_biased=fields.get_boolean("mamba_proj_bias", False),
    )
    if shape.inner_size != inner:
        raise BrokenModel(
            f"{fields.where}: mamba_n_heads {heads} of mamba_d_head {shape.head_dim} are not "
            f"{stated}, {inner}"
        )
    _check_groups(shape, fields, "mamba_n_heads", "mamba_n_groups")
    return shape


def _check_groups(shape: Mamba2Shape, fields: ConfigFields, heads: str, groups: str) -> None:
    """Check that groups divide heads, and that steps have no limits; the names are the fields'."""
    if shape.heads % shape.groups:
        raise BrokenModel(
            f"{fields.where}: {heads} {shape.heads} is not a multiple of {groups} {shape.groups}"
        )
    limits = fields.get_value("time_step_limit")
    if limits is not None and limits not in _NO_LIMITS:
        raise UnsupportedModel(
            f"{fields.where}: time_step_limit {str(limits)[:80]} is not supported"
        )


def parse_linear_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Layers with ``linear_attention``, by ``layer_types`` or ``full_attention_interval``.

    Raises:
        UnsupportedModel: a layer is of another kind, or none has attention.
        BrokenModel: the list has another length.
    """
    interval = fields.get_integer("full_attention_interval", 4)
    attended = range(interval - 1, layers, interval)
    return _parse_listed_layers(fields, layers, "linear_attention", frozenset(attended))


def parse_kimi_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Layers with ``linear_attention``, by ``layer_types``, or all but ``full_attn_layers``, which
    are counted from 1.

    Raises as :func:`parse_linear_layers`.
    """
    listed = fields.get_object(_LINEAR_CONFIG)
    inner = ConfigFields(listed, f"{fields.where}: {_LINEAR_CONFIG}")
    attended = [number - 1 for number in inner.get_integers("full_attn_layers")]
    usual = range(4, layers, 4)
    return _parse_listed_layers(fields, layers, "linear_attention", frozenset(attended or usual))


def parse_conv_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Layers with ``conv``, by ``layer_types``, or all but ``full_attn_idxs``.

    Raises as :func:`parse_linear_layers`.
    """
    attended = fields.get_integers("full_attn_idxs")
    return _parse_listed_layers(fields, layers, "conv", frozenset(attended or range(layers)))


def parse_mamba_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Layers with Mamba-2, by ``layer_types``; raises as :func:`parse_linear_layers`."""
    return _parse_listed_layers(fields, layers, "linear_attention", frozenset())


def parse_nemotron_layers(fields: ConfigFields, layers: int) -> tuple[str, ...]:
    """Each layer's kind: ``mamba``, ``attention``, ``mlp`` or ``moe``.

    Raises:
        UnsupportedModel: a layer is of another kind, or none has attention.
        BrokenModel: the list is missing or has another length.
    """
    name = "layers_block_type" if fields.get_strings("layers_block_type") else _LAYER_TYPES
    kinds = fields.get_strings(name)
    if kinds is None:
        name = "hybrid_override_pattern"
        letters = fields.get_string(name)
        kinds = tuple(_NEMOTRON_LETTERS.get(one, one) for one in letters)
    kinds = tuple(_NEMOTRON_KINDS.get(one, one) for one in kinds)
    _check_kinds(fields, name, kinds, layers, ("attention", "mamba", "mlp", "moe"))
    return kinds


def _parse_listed_layers(
    fields: ConfigFields, layers: int, kind: str, attended: frozenset[int]
) -> frozenset[int]:
    """Layers that ``layer_types`` says are of ``kind``; without that list, all but ``attended``."""
    kinds = fields.get_strings(_LAYER_TYPES)
    if kinds is None:
        kinds = tuple(_FULL if layer in attended else kind for layer in range(layers))
    kinds = tuple(_OLD_KINDS.get(one, one) for one in kinds)
    _check_kinds(fields, _LAYER_TYPES, kinds, layers, (_FULL, kind))
    return frozenset(layer for layer in range(layers) if kinds[layer] == kind)


def _check_kinds(
    fields: ConfigFields, name: str, kinds: tuple[str, ...], layers: int, known: tuple[str, ...]
) -> None:
    """Check the kinds in the list ``name``; the first of the ``known`` ones has attention."""
    if len(kinds) != layers:
        raise BrokenModel(f"{fields.where}: {name} has {len(kinds)} entries for {layers} layers")
    other = next((one for one in kinds if one not in known), None)
    if other is not None:
        raise UnsupportedModel(f"{fields.where}: layers with {other[:40]!r} are not supported")
    if known[0] not in kinds:
        raise UnsupportedModel(f"{fields.where}: a model without {_FULL} is not supported")
