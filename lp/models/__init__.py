"""Load models and run their forward passes: captured steps, fused layers, KV caches, checks, tensor parallelism."""
