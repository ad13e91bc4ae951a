"""molink pools home PCs into one LLM server.

This package is the library: decisions without I/O, computation, and messages. The package
``molinkd`` has the processes. ``docs/architecture.md`` has a map of both.
"""

from molink.cpu_isa import limit_libraries

__version__ = "0.1.0"

limit_libraries()
