"""Captured steps against float64 and against steps that are not captured."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
