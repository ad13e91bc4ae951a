"""molink pools the PCs that people already own into one LLM server."""

__version__ = "0.1.0"
