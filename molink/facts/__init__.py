"""What every other package may know: measured profiles, facts of devices and models, stories."""
