"""Records say which command and which commit they come from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from launch.bench.origin import command, commit


def test_the_commit_of_a_clone(tmp_path: Path) -> None:
    """Figures of changed code must not pass for those of its commit; an installed wheel has none."""
    assert commit(tmp_path) is None and command() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    file = tmp_path / "file"
    file.write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = commit(tmp_path)
    assert clean and len(clean) >= 7 and "-" not in clean
    file.write_text("2")
    assert commit(tmp_path) == f"{clean}-dirty"
