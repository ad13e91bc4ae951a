"""The stage agent: workers, devices and their preparation."""
