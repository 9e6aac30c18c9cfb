"""Fuzzers: frames and the block as hostile workers write them, configs, and contended slots.

Each is a function of a count and a seed that returns a report, so that the suite runs a short form
and a soak test a long one. What they find is repeated by the seed.
"""
