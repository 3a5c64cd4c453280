"""Tangent attention: queries in a tree of clusters, the best keys one by one, the others folded.

`tree` orders queries and keys, `near` chooses keys, `far` folds the others into far keys, `levels` puts them
together as one differentiable operator.

Nearest relative: Vyas, Katharopoulos, Fleuret, *Fast Transformers with Clustered Attention*, 2020.
"""
