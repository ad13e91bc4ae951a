"""A peer's decisions about its own stages."""
