"""The Hydra apps; hydra and omegaconf are imported here alone."""
