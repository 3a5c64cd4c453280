"""`smyrf bench quality`: error against key visits and against time, of our methods and of others.

`inputs` loads q, k and v, `cases` says what is compared, `peers` loads other people's methods, `measure`
measures, `table` and `plot` show, `command` runs it all.
"""
