"""Layers that keep a recurrent state of each request instead of keys and values."""

from dataclasses import dataclass

from molink.checkpoint.config_fields import ConfigFields
from molink.errors import BrokenModel, UnsupportedModel

_FULL, _LINEAR = "full_attention", "linear_attention"
#: Limits for damaged configs.
_MAX_HEADS = 1024
_MAX_DIM = 1024
_MAX_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleShape:
    """The gated delta rule (Gated DeltaNet, arXiv 2412.06464, §3) behind a causal convolution.

    There are ``key_heads`` queries and keys of ``key_dim`` and ``value_heads`` values of
    ``value_dim``; consecutive values share a key. Queries, keys and values are channels of the
    convolution, which takes ``conv_width`` rows of each. If it ``is_grouped``, one projection gives
    them with the gates, ordered by key heads, and another rates and decays; else gates, rates and
    decays have projections of their own.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    is_grouped: bool = False

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
    def conv_shape(self) -> tuple[int, int]:
        """Shape of the rows that the convolution still needs."""
        return self.conv_width - 1, self.channels

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """Shape of the sums of keys times values."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of a request's state in a layer."""
        heads, rows, columns = self.memory_shape
        return (self.conv_width - 1) * self.channels + heads * rows * columns


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
        is_grouped=is_grouped,
    )
    if shape.value_heads % shape.key_heads:
        raise BrokenModel(
            f"{fields.where}: linear_num_value_heads {shape.value_heads} is not a multiple of "
            f"linear_num_key_heads {shape.key_heads}"
        )
    return shape


def parse_linear_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Layers with ``linear_attention``, by ``layer_types`` or ``full_attention_interval``.

    Raises:
        UnsupportedModel: a layer is of another kind, or none has attention.
        BrokenModel: the list has another length.
    """
    listed = fields.get_strings("layer_types")
    if listed is None:
        interval = fields.get_integer("full_attention_interval", 4)
        listed = tuple(_LINEAR if layer % interval else _FULL for layer in range(1, layers + 1))
    if len(listed) != layers:
        raise BrokenModel(
            f"{fields.where}: layer_types has {len(listed)} entries for {layers} layers"
        )
    other = next((kind for kind in listed if kind not in (_FULL, _LINEAR)), None)
    if other is not None:
        raise UnsupportedModel(f"{fields.where}: layers with {other!r} are not supported")
    if _FULL not in listed:
        raise UnsupportedModel(f"{fields.where}: a model without {_FULL} is not supported")
    return frozenset(layer for layer in range(layers) if listed[layer] == _LINEAR)
