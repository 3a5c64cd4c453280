"""`smyrf bench`: time and peak memory of attention, the paper's profiling tool.

`cases` says what to measure, `contenders` what is compared, `timing` and `peak` measure, `results` holds
and saves, `table` and `plots` show.
"""
