"""Prompts and measurements."""
