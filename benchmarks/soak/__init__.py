"""Hours of mixed load on one store, with faults, restarts and kills, against a model of it."""
