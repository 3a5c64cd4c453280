"""The operator by which `smyrf.attention` calls PyTorch's function."""

import torch

# ``F.scaled_dot_product_attention`` under a name by which a mode can tell that `smyrf.attention` calls it.
exact_attention = torch.ops.aten.scaled_dot_product_attention.default
