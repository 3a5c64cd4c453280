"""``python -m smyrf.cli``, which is how ``torchrun`` and ``accelerate launch`` start the command."""

from smyrf.cli import main

if __name__ == "__main__":
    main()
