"""molink's placement compared with an exhaustive search, over described swarms."""
