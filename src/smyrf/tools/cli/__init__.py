"""The commands of `smyrf`, one file each. Bad input gives one sentence, never a traceback."""
