"""Profiles and examples as TOML files, to read and to copy; installed as ``molink.configs``."""
