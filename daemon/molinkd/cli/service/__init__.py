"""``molink service``: let the operating system run this PC's daemon."""
