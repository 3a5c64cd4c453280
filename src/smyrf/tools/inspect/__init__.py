"""`smyrf inspect`: every head of a model, how well methods approximate it, and a text as a head sees it.

`smyrf.tools.analysis` has the measures; this package applies them to a model and its inputs, and shows the results.
"""
