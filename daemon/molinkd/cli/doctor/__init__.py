"""``molink doctor``: diagnose this PC and suggest fixes."""
