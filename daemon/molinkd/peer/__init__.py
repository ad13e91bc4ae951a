"""The daemon of one PC."""
