"""What the user typed: the schemas of conf/, the prompt beside it, and the decoders that a config names."""
