"""What every run needs: Hydra around its job, errors as a user reads them, what ranks say once, the model's session."""
