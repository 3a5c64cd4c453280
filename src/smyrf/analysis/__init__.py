"""What attention maps are like, how good an approximation of them is, and why; the paper's theory as running code.

From a model to its heads: `calls`, `capture`, `encoders`; all about each head: `inspection`, `hardness`, `tokens`.
Measures one by one: `maps`, `sparsity`, `spectrum`, `character`, `reach`, `balance`, `approximate`, `error`. Theory:
`biclustering`, `solver`, `matching`. Functions are imported from these modules, some of which bear their names.
"""
