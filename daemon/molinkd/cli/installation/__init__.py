"""``molink setup``, ``update`` and ``uninstall``: the program on this PC."""
