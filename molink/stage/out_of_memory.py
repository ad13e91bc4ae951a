"""Limits a process's GPU memory, and detects out-of-memory errors."""

import torch

#: Texts of out-of-memory errors that don't have torch's own type.
_OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",  # CPU allocator
    "not enough memory",  # CPU allocator on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS has no memory for its workspace
    "CUDA error: out of memory",
)


def limit_memory(device: str, nbytes: int) -> None:
    """Limit torch to ``nbytes`` of a GPU, excluding the CUDA context; 0 = unlimited.

    On Windows an over-allocated GPU silently spills to RAM and becomes many times slower; a limit
    makes this an error.
    """
    torch_device = torch.device(device)
    index = torch_device.index or 0
    if torch_device.type != "cuda" or not nbytes or index >= torch.cuda.device_count():
        return  # loading reports missing devices
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), index)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that device or host memory is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in _OUT_OF_MEMORY_TEXTS
    )


def empty_device_cache() -> None:
    """Release torch's cached memory, whose fragments may be too small for the next step."""
    torch.cuda.empty_cache()  # no effect without an active GPU
