"""molink pools the PCs that people already own into one LLM server.

This is the library: what decides, computes and speaks. What runs is ``molinkd``. The map of both is
``docs/architecture.md``.
"""

__version__ = "0.1.0"
