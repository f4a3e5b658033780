"""Input of the apps: prompts from the package, files and the hub, images, and shapes of published models."""
