"""The parts of `kvtier demo`: its model, its measurements, its second process, its report."""
