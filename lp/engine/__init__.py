"""Decoders and the engine that runs their steps, and plain decoding that shares no code with it, to check tokens."""
