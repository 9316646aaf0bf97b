"""Studies on a virtual clock: what overlap gains (``overlap.py``) and what pool sizes give (``hits.py``).

The engine is the one that serves, with its tree, lifecycle, ledger and eviction. Pools have sizes and no bytes (``transfer.py``), so that
pools of any size fit, and copies take the time that their bytes take on a link of a given bandwidth.
"""
