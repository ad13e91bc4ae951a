"""The kernels that there may be on a device, by the names that people see."""

from typing import Literal

KernelName = Literal[
    "compiled-linear",
    "packed-linear",
    "gguf-blocks",
    "compiled-rows",
    "compiled-attention",
    "flash-attention",
    "gather-attention",
    "plain-attention",
    "int8",
    "nf4",
    "unpacked",
    "graphs",
    "pinned-copies",
    "torch",
    "torch-rows",
]

#: What computes in the place of one that is avoided. The others have no substitute.
FALLBACKS: dict[str, str] = {
    "compiled-linear": "torch's own product",
    "packed-linear": "torch's own product",
    "gguf-blocks": "weights that become bf16 as they are loaded",
    "compiled-rows": "torch's own norms, gates and rotations",
    "compiled-attention": "gather-attention",
    "flash-attention": "gather-attention",
    "gather-attention": "attention without fused kernels",
    "int8": "weights that are unpacked in each step",
    "nf4": "weights that are unpacked in each step",
    "graphs": "kernels that are launched one by one",
    "pinned-copies": "copies that are waited for",
}

#: Kernels that are only needed where one of these is wrong.
USED_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "plain-attention": ("gather-attention",),
    "unpacked": ("int8", "nf4"),
}
