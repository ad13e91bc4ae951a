"""Small helpers without I/O that every layer shares."""
