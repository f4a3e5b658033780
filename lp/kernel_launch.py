"""Options with which lp launches each of its Triton kernels."""

from __future__ import annotations

# FP fusion: a product and the sum it goes into are rounded once, not twice. Triton 3.9 warns where a launch does not
# choose, and 3.10 will turn it off there, which would change the rounding and the speed of every kernel.
LAUNCH = {"enable_fp_fusion": True}
