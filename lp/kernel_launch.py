"""Options with which lp launches each of its Triton kernels."""

from __future__ import annotations

# A product and the sum it goes into are rounded once, not twice. Triton 3.9 warns where this is left open, and 3.10
# leaves it off, which would change the rounding of every kernel, and its speed.
LAUNCH = {"enable_fp_fusion": True}
