"""Experts that a checkpoint stores as one tensor per layer (gpt-oss, Granite, Qwen3.5, Llama 4).

Elsewhere each expert has separate tensors, ``….experts.3.down_proj.weight``; this module maps them
into stacks. Weights of a stack ``[experts, in, out]`` are transposed. In MXFP4 (OCP Microscaling
Formats, §5.1), ``…_blocks`` ``[experts, out, in / 32, 16]`` has two 4-bit floats per byte, lower
half first, and ``…_scales`` ``[experts, out, in / 32]`` the biased (127) exponent of each 32.
Biases are ``…_bias`` ``[experts, out]``.

Granite's ``input_linear`` is a stack ``[experts, 2 * out, in]`` of gates and ups, ``output_linear``
one of ``[experts, out, in]``. Qwen3.5 calls them ``experts.gate_up_proj`` and
``experts.down_proj``, as gpt-oss does, but has no biases. Llama 4's and Qwen3-VL's have the same
names and are transposed, which their shapes tell.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from molink.checkpoint.safetensors_header import TensorSpec
from molink.gguf.block_formats import MXFP4_BLOCK

_EXPERT_PATTERN = re.compile(r"(.+\.experts)\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")


#: An expert's projection → its stack in Granite, its stack in Qwen3.5 and Llama 4, its part of an
#: entry's outputs, and the number of equal parts.
_ROW_STACKS = {
    "gate_proj": ("input_linear.weight", "experts.gate_up_proj", 0, 2),
    "up_proj": ("input_linear.weight", "experts.gate_up_proj", 1, 2),
    "down_proj": ("output_linear.weight", "experts.down_proj", 0, 1),
}
#: Names of a layer's two stacks (gates with ups, downs), in both spellings.
_STACK_PAIRS = (
    ("input_linear.weight", "output_linear.weight"),
    ("experts.gate_up_proj", "experts.down_proj"),
)


@dataclass(frozen=True, slots=True)
class StackedExpert:
    """An expert's tensor is entry ``index`` of the tensors ``names`` (two for MXFP4).

    It is the ``part``-th of ``parts`` equal parts of the entry's outputs.
    """

    index: int
    names: tuple[str, ...]
    is_transposed: bool = True
    part: int = 0
    parts: int = 1

    @property
    def is_mxfp4(self) -> bool:
        """Whether the stack is in MXFP4: blocks and scales."""
        return len(self.names) == 2

    def stack_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Compute the stacks' shapes if this expert is the last one; empty if impossible.

        ``shape`` is the shape of the expert's own tensor.
        """
        count = self.index + 1
        if self.is_mxfp4:
            groups, rest = divmod(shape[1], MXFP4_BLOCK)
            scales = (count, shape[0], groups)
            shapes = ((*scales, MXFP4_BLOCK // 2), scales)
            return {} if rest else dict(zip(self.names, shapes, strict=True))
        whole = shape[0] * self.parts, *shape[1:]
        return {self.names[0]: (count, *(reversed(whole) if self.is_transposed else whole))}


def find_stack(name: str, found: Mapping[str, TensorSpec]) -> StackedExpert | None:
    """Return the stack that holds an expert's tensor ``name``; ``None`` if no stack does."""
    stack = _match_stack(name, found)
    if stack is None or stack.is_transposed:
        return stack
    return replace(stack, is_transposed=_is_transposed(stack.names[0], found))


def _is_transposed(name: str, found: Mapping[str, TensorSpec]) -> bool:
    """Whether ``name`` and the stack beside it are ``[experts, in, out]``.

    Their shapes show it: both contain the experts' width, and one contains it twice.
    """
    for up, down in _STACK_PAIRS:
        if name.endswith((up, down)):
            module = name.removesuffix(up).removesuffix(down)
            shapes = [
                found[one].shape for one in (f"{module}{up}", f"{module}{down}") if one in found
            ]
            return [len(shape) for shape in shapes] == [3, 3] and shapes[0][2] == 2 * shapes[1][1]
    return False


def _match_stack(name: str, found: Container[str]) -> StackedExpert | None:
    """Like :func:`find_stack`, but without detecting transposed stacks."""
    match = _EXPERT_PATTERN.fullmatch(name) if ".experts." in name and name not in found else None
    if match is None:
        return None
    prefix, index, projection, kind = match.groups()
    stack = f"{prefix}.{projection}"
    if kind == "bias":
        spellings: tuple[tuple[str, ...], ...] = ((f"{stack}_bias",),)
    else:
        spellings = ((f"{stack}_blocks", f"{stack}_scales"), (stack,))
        if projection in _ROW_STACKS:
            *names, part, parts = _ROW_STACKS[projection]
            module = prefix.removesuffix("experts")
            for rows in (f"{module}{name}" for name in names):
                if rows in found and f"{rows}_bias" not in found:
                    return StackedExpert(int(index), (rows,), False, part, parts)
    chosen = next((names for names in spellings if names[0] in found), None)
    return None if chosen is None else StackedExpert(int(index), chosen)


def stack_names(name: str, found: Container[str]) -> tuple[str, ...]:
    """Return the names of the tensors that hold an expert's tensor; empty if it is not stacked."""
    place = _match_stack(name, found)
    return () if place is None else place.names
