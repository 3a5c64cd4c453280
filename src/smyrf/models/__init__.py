"""Attention inside models that exist: replaced, put back, and reported."""
