"""CPU kernels that are compiled for this CPU when a worker loads its weights."""
