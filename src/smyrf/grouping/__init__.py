"""Grouping: who meets whom. From q, k and v to groups of queries with their keys."""
