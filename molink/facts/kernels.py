"""User-visible names of kernels, and limits of their inputs."""

from typing import Literal

KernelName = Literal[
    "compiled-linear",
    "packed-linear",
    "gguf-blocks",
    "grouped-experts",
    "int8-rows",
    "int8-rows-8bit",
    "int8-rows-codebook",
    "compiled-rows",
    "compiled-sampling",
    "compiled-attention",
    "flash-attention",
    "triton-attention",
    "gather-attention",
    "plain-attention",
    "quantized-blocks",
    "int8",
    "nf4",
    "unpacked",
    "graphs",
    "pinned-copies",
    "torch",
    "torch-rows",
]

#: Largest head of GPU attention kernels; larger ones (latent attention) use gather attention.
MAX_KERNEL_HEAD_DIM = 256
#: Products of quantized weights with rows rounded to 8 bits.
INTEGER_KERNELS: tuple[KernelName, ...] = (
    "int8-rows",
    "int8-rows-8bit",
    "int8-rows-codebook",
)
#: Turing: the oldest GPUs whose tensor cores Triton supports, and so with kernels for low-bit
#: weights.
MIN_TRITON_CAPABILITY = (7, 5)

#: Replacements of disabled kernels. Other kernels have none.
FALLBACKS: dict[str, str] = {
    "compiled-linear": "torch's own product",
    "packed-linear": "torch's own product",
    "gguf-blocks": "dequantization to bf16 on loading",
    "grouped-experts": "one expert after the other",
    "int8-rows": "rows in full precision beside weights of 4 to 6 bits",
    "int8-rows-8bit": "rows in full precision beside weights of 8 bits",
    "int8-rows-codebook": "rows in full precision beside weights with a codebook",
    "compiled-rows": "torch's own norms, gates and rotations",
    "compiled-sampling": "torch's own sampling",
    "compiled-attention": "gather-attention",
    "flash-attention": "triton-attention, or gather-attention",
    "triton-attention": "gather-attention",
    "gather-attention": "attention without fused kernels",
    "quantized-blocks": "other products of int8 and nf4 weights",
    "int8": "dequantization in each step",
    "nf4": "dequantization in each step",
    "graphs": "launching kernels one by one",
    "pinned-copies": "synchronous copies",
}

#: Kernels that are only needed if one of these is disabled or absent.
USED_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "plain-attention": ("gather-attention",),
    "unpacked": ("int8", "nf4"),
}
