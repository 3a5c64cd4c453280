"""A look inside a model: every head of its attention, what methods make of it, and a text as a head sees it.

The measures are in `smyrf.tools.analysis`; here they are run on a model and its inputs, and shown.
"""
