"""molink's placement beside an exhaustive search, over described swarms."""
