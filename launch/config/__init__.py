"""Configs of the apps: schemas of the YAML files in conf/, the prompt, and the decoders that a config names."""
