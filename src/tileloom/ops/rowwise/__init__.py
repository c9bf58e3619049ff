"""Operators on the rows of a tensor `[..., n]`: one folder each, and what they share."""
