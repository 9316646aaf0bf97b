"""Benchmarks: ratios of two ways to do one thing, taken in one process in alternating rounds, with what was to be reached beside them.

``harness.py`` measures, ``rows.py`` lists what is measured, ``report.py`` writes it down, ``command.py`` is ``cphicache bench``.
"""
