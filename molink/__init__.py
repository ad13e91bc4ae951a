"""molink pools home PCs into one LLM server.

This package is the library: deciders, computation, messages. The processes are in ``molinkd``.
``docs/architecture.md`` has a map of both.
"""

__version__ = "0.1.0"
