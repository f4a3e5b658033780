"""pass@1: run the programs that a model wrote against the tests of their task, in a child process with limits."""

from .checks import CHECKS, Verdict, check_prompts, judge
from .execution import check_limits

__all__ = ["CHECKS", "Verdict", "check_limits", "check_prompts", "judge"]
