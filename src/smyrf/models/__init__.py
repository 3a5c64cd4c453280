"""Attention inside existing models: replaced, restored, captured and reported."""
