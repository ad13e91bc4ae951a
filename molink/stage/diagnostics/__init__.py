"""Device probes, stage profiles, kernel self-tests and the stage benchmark."""
