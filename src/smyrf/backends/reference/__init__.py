"""The reference backend: the equations in plain, differentiable PyTorch. The others are tested against it."""
