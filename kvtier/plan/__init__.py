"""What a tier would bring: time to first token, throughput, money and energy, from stated inputs.

Nothing here measures: bandwidths, hit rates and prices are given, and every figure carries its formula and
the inputs behind it. `docs/PLANNING.md` explains the model and what it assumes.
"""
