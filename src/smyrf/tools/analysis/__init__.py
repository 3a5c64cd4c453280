"""Measures of attention maps and of their approximations, head by head.

Per head: `inspection`, `hardness`, `tokens`, `cluster_grids`. Single measures: `maps`, `sparsity`, `spectrum`,
`head_profile`, `visited_keys`, `cluster_sizes`, `approximate_map`, `error`.
"""
