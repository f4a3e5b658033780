"""Shared by all apps: starting through Hydra, error messages, printing once for all ranks, and the model's session."""
