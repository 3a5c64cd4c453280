"""One page about a model: what its attention looks like, and what each method makes of it."""
