"""The paper's theory as running code: Attention Biclustering, its exact optimum, and Theorem 1."""
