"""Test equipment that ships with kvtier: emulated storage devices with a device's timing and faults.

`kvtier.testing.emulated` has the devices, `.profiles` their figures, `.faults` what can go wrong.
"""
