"""The figure of projected GPUs: speed by their number, for several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.bench.plots import COLOURS, figure, look

from .gpu_projection import GpuLine, LogLaw


def projection_plot(series: Mapping[str, Sequence[GpuLine]], caption: str, path: Path) -> Path:
    """S with its law, by series; of those with several GPUs the speed over one, and of the last the parts of a step."""
    scaled = {name: lines for name, lines in series.items() if len({line.ranks for line in lines}) > 1}
    with figure(path, caption, 6.4, 3) as (_, (upper, middle, lower)):
        for number, (name, lines) in enumerate(series.items()):
            law = LogLaw.of(lines)
            tokens = [line.step_tokens for line in lines]
            hollow = look(number, f"{name}: {law}") | {"markerfacecolor": "none"}
            upper.plot(tokens, [line.compression for line in lines], **hollow | {"linestyle": "none"})
            upper.plot(tokens, [law.compression(count) for count in tokens], color=hollow["color"])
            if name in scaled:
                ratios = [line.tokens_per_s / lines[0].tokens_per_s for line in lines]
                middle.plot([line.ranks for line in lines], ratios, **hollow | {"linestyle": "--", "label": name})
        last, lines = list((scaled or series).items())[-1]
        bottom = [0.0] * len(lines)
        for part, colour in zip(dict.fromkeys(part for line in lines for part in line.parts), COLOURS, strict=False):
            heights = [1e3 * line.parts.get(part, 0.0) for line in lines]
            bars: dict[str, Any] = {"color": colour, "label": part, "hatch": "////", "edgecolor": "white"}
            lower.bar([str(line.ranks) for line in lines], heights, 0.7, bottom, **bars)
            bottom = [start + height for start, height in zip(bottom, heights, strict=True)]
        step_tokens = {line.step_tokens for each in series.values() for line in each}
        for axes, numbers in ((upper, sorted(step_tokens)), (middle, [line.ranks for line in lines])):
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers, map(str, numbers))
            axes.set_ylim(0, None)
        upper.set(xlabel="tokens a step, of all ranks", ylabel="S", ylim=(0, 1.5 * upper.get_ylim()[1]))
        middle.set(xlabel="GPUs (by arithmetic)", ylabel="speed over 1 GPU (x)", ylim=(0, 1.1 * middle.get_ylim()[1]))
        lower.set(xlabel=f"GPUs (by arithmetic), {last}", ylabel="ms a step", ylim=(0, 1.3 * max(bottom)))
        upper.legend(loc="upper left")
        middle.legend()
        lower.legend(loc="upper left", ncols=4)
    return path
