"""How many positions each layer attends to, as the families spell it.

A window of W means a row and the W - 1 rows before it; 0 means all of them.
"""

from molink.checkpoint.config_fields import ConfigFields
from molink.errors import BrokenModel, UnsupportedModel

_FULL, _SLIDING = "full_attention", "sliding_attention"


def parse_uniform_windows(
    fields: ConfigFields, layers: int, default: int | None
) -> tuple[int, ...]:
    """``sliding_window`` for all layers; ``null`` is none, ``default`` what absence means."""
    return (fields.get_optional_integer("sliding_window", default) or 0,) * layers


def parse_upper_windows(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """``sliding_window`` from layer ``max_window_layers`` on, if ``use_sliding_window``.

    ``layer_types`` overrules where it is there (Qwen2, Qwen3).
    """
    sliding = fields.get_boolean("use_sliding_window", False)
    window = fields.get_optional_integer("sliding_window", 4096) if sliding else None
    listed = fields.get_strings("layer_types")
    if listed is not None:
        return _make_windows(fields, listed, layers, window)
    first = fields.get_number("max_window_layers", 28)
    return tuple((window or 0) if layer >= first else 0 for layer in range(layers))


def parse_typed_windows(fields: ConfigFields, layers: int, full_every: int) -> tuple[int, ...]:
    """``sliding_window`` where ``layer_types`` says so.

    Without that list it is all layers but each ``full_every``-th (Gemma).
    """
    window = fields.get_optional_integer("sliding_window", 4096)
    listed = fields.get_strings("layer_types")
    if listed is None:
        listed = tuple(_SLIDING if layer % full_every else _FULL for layer in range(1, layers + 1))
    return _make_windows(fields, listed, layers, window)


def refuse_windows(fields: ConfigFields) -> None:
    """For families that have none.

    Raises:
        UnsupportedModel: the config asks for some.
    """
    kinds = fields.get_strings("layer_types") or ()
    kind = next((kind for kind in kinds if kind != _FULL), None)
    if kind is None and fields.get_boolean("use_sliding_window", False):
        kind = _SLIDING
    if kind is not None:
        raise UnsupportedModel(
            f"{fields.where}: layers with {kind!r} are not supported in this architecture"
        )


def _make_windows(
    fields: ConfigFields, kinds: tuple[str, ...], layers: int, window: int | None
) -> tuple[int, ...]:
    where = fields.where
    if len(kinds) != layers:
        raise BrokenModel(f"{where}: layer_types has {len(kinds)} entries for {layers} layers")
    other = next((kind for kind in kinds if kind not in (_FULL, _SLIDING)), None)
    if other is not None:
        raise UnsupportedModel(f"{where}: layers with {other!r} are not supported")
    if window is None and _SLIDING in kinds:
        raise BrokenModel(f"{where}: layer_types has {_SLIDING!r}, but there is no sliding_window")
    return tuple((window or 0) if kind == _SLIDING else 0 for kind in kinds)
