"""`smyrf bench`: time and peak memory of attention, the paper's profiling tool.

`cases` says what to measure, `contenders` what is compared, `timing` and `peak` measure (`fresh` in a process
of its own), `gemm` says what the machine could do, `results` holds and saves, `table` and `plots` show.
"""
