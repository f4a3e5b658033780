"""The token budget: decides how many window columns and draft tokens each step computes, by what they cost and gain."""
