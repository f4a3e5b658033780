"""Load models, and run forward passes of them: captured steps, fused layers, KV caches, checks, tensor parallelism."""
