"""`smyrf compare`: a whole model with other attention, against itself.

`contenders` says what is compared, `subject` loads the model, `texts`, `images` and `sounds` read files and `inputs`
makes batches of them; `drift` measures how far outputs move, `memory` what a forward pass needs; `run` fills the rows
that `table` and `plot` show, and `command` is all of it.
"""
