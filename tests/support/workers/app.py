"""An app on every rank, as torchrun starts it."""

from __future__ import annotations

from pathlib import Path

from launch import cli


def main(folder: Path, name: str, *args: str) -> None:
    cli.start(name, args)
