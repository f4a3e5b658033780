"""Figures of a scaling table, where it has little to show."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from launch.bench.plots import scaling_plots
from launch.bench.scaling_lines import MEASURED, Line
from launch.config.builders import PLAIN


def test_a_legend_needs_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`lp scaling 'methods=[plain]'` has no line to name: matplotlib's warning stood between the table and its end."""
    figures = dict.fromkeys(("tokens_per_s", "compression", "num_tokens", "forward_ms", "exchange_ms", "host_ms"), 1.0)
    plain = Line(method=PLAIN, ranks=1, kind=MEASURED, link=None, W=None, G=None, speedup=1.0, **figures)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in scaling_plots([plain], "made up", tmp_path):
            assert path.exists()
    assert not caplog.records
