"""Load on a store that verifies every byte: for hours, with restarts and kills.

`content` has the bytes, `worker` one thread of the load, `run` its course, `child` the process that is
killed, `watch` what must not grow, and `faults` what an emulated device does meanwhile.
"""
