"""Functions that are compiled for this very CPU when a worker loads its weights."""
