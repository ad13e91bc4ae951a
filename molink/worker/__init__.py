"""The stage process: receive, order, fuse, run, send."""
