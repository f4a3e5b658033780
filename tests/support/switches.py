"""Configs of drawn settings, whose ablations stand among the others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import lp

SWITCHES = frozenset(item.name for item in fields(lp.Ablation))


def lookahead_config(**settings: Any) -> lp.LookaheadConfig:
    """A LookaheadConfig with these fields of its own and of its `ablation`."""
    switches = {name: value for name, value in settings.items() if name in SWITCHES}
    others = {name: value for name, value in settings.items() if name not in SWITCHES}
    return lp.LookaheadConfig(**others, ablation=lp.Ablation(**switches))
