"""Decoders, the engine that runs their decode steps, and an independent plain decoder to check their tokens against."""
