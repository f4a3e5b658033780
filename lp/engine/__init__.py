"""Decoders: the one lookahead loop, and the plain oracle it is checked against."""
