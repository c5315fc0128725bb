"""The facade: what callers talk to, and the paths that reads and writes take through the tiers."""
