"""`smyrf bench quality`: error against key visits and against time, of our methods and of others.

`inputs` loads q, k and v, `entrants` lists what is compared, `peers` loads methods from outside, `measure` measures,
`table` and `plot` show the results, `command` runs it all.
"""
