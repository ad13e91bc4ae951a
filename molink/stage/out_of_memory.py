"""A process's share of a GPU, and what is done when memory has run out."""

import torch

#: How other errors than torch's own begin or say that memory has run out.
_OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",  # the CPU allocator
    "not enough memory",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS has no room for what it needs itself
    "CUDA error: out of memory",
)


def limit_memory(device: str, nbytes: int) -> None:
    """Let torch allocate at most ``nbytes`` of a GPU from now on; 0 or a CPU: no bound.

    On Windows a GPU that is over-allocated goes on in RAM, many times slower, without an error:
    with a bound there is one instead. The CUDA context comes on top.
    """
    place = torch.device(device)
    index = place.index or 0
    if place.type != "cuda" or not nbytes or index >= torch.cuda.device_count():
        return  # a device that isn't there is reported by who loads onto it
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), index)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of a device or of the PC, has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in _OUT_OF_MEMORY_TEXTS
    )


def empty_device_cache() -> None:
    """Give back what torch keeps for later: in pieces it may be of no use to the next step."""
    torch.cuda.empty_cache()  # which does nothing where no GPU is in use
