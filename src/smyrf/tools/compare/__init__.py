"""`smyrf compare`: a whole model with other attention, against itself.

`contenders` lists what is compared; `load_model` loads the model and `inputs` makes batches of what `texts`, `images`
and `sounds` read; `drift` measures how far outputs move, `memory` the peak of a forward pass; `run` fills the rows
that `table` and `plot` show, and `command` runs it all.
"""
