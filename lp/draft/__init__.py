"""The method itself, free of transformers and torch.distributed."""
