"""Applies decided rounds to anchor, moments and weights.

`commit` has the means fetched, takes the outer step (`outer_step`), and hands a landing to the training thread.
"""
