"""`smyrf bench`: time and peak memory of attention, the paper's profiling tool.

`problems` defines what is measured and `baselines` what it is compared with; `run` measures (`peak_memory` in a fresh
process, `roofline` the rate of large matrix products); `measurement` holds the results, `table` and `plot` show them.
"""
