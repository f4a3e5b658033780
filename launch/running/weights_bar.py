"""Show the progress of loading weights in lp's own wait line, instead of transformers' progress bar."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers.utils.logging as bars
from tqdm import tqdm

from lp.waits import Wait


@contextmanager
def tensors_counted(wait: Wait) -> Iterator[None]:
    """Within the block, transformers draws no progress bar: the tensors that it has loaded are counted in `wait`.

    Args:
        wait: the wait whose `done` is set to the number of loaded tensors, and `total` to that of all tensors.
    """

    class Counted(tqdm):
        def display(self, *args: Any, **kwargs: Any) -> None:
            wait.done, wait.total, wait.unit = self.n, self.total or 0, "tensors"

    def counted(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return Counted(*args, **options | {"file": io.StringIO()})  # it ends its line wherever that is

    if not hasattr(bars, "set_tqdm_hook"):  # an earlier transformers
        bars.disable_progress_bar()
        yield
        return
    before = bars.set_tqdm_hook(counted)
    try:
        yield
    finally:
        bars.set_tqdm_hook(before)
