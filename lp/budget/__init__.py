"""The token budget: decides how many window columns and draft tokens each decode step computes, so that they pay.

A token pays if the generated tokens expected from it are worth more than the time that it takes.
"""
