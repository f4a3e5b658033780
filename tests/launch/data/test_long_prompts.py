"""Long prompts end with the prompt itself, and are exactly as long as was asked for."""

from __future__ import annotations

from launch.data.long_prompts import lengthened


def test_other_prompts_stand_in_front() -> None:
    """A prompt cut at its end, or one whose BOS lies in the middle, would be another question."""
    others = [[1, 2], [3, 4, 5]]
    assert lengthened([8, 9], others, 6, None) == [4, 5, 1, 2, 8, 9]
    assert lengthened([8, 9], others, 9, None) == [1, 2, 3, 4, 5, 1, 2, 8, 9], "and again from the first"
    assert lengthened([0, 8, 9], others, 6, 0) == [0, 5, 1, 2, 8, 9]
    assert lengthened([8, 9], others, 2, None) == [8, 9] == lengthened([8, 9], others, 1, 0)
