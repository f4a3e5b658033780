"""What is decoded: prompts, from the package, files and the hub, and shapes of published models."""
