"""Load generator and metrics for any OpenAI-compatible endpoint."""
