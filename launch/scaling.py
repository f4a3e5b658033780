"""`lp scaling`: methods on 1, 2, ... ranks, measured by launches of `lp benchmark`, or projected from one device.

Measured: one launch for each number in `ranks`, on the nodes that it needs. The column "vs plain" is the speed divided
by that of plain decoding on one device with nothing else running, which is launched too where `ranks` has no 1. A
second column divides by plain decoding on one device of the same launch, whose ranks may share cores.

Projected (project=true): every rank's part of the work is timed on this device; each table and plot marks these lines.
`--cfg job` shows the keys.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from hydra.core.hydra_config import HydraConfig

from lp.checks import check_int
from lp.commands import app_command
from lp.errors import UserError
from lp.parallel.context import check_timeouts

from .bench.baselines import BASELINES
from .bench.machine import remarks
from .bench.methods import check_divisible, check_pass_at_1, methods_of, missing_methods, own_names
from .bench.plots import scaling_plots
from .bench.projected_scaling import LOOKAHEAD, project_all
from .bench.projection import check_projectable
from .bench.quality import check_rouge
from .bench.record_settings import settings_of
from .bench.records import Record, digest, load_records
from .bench.runs import ModelCache, open_bench
from .bench.scaling_lines import (
    IN_LAUNCH,
    MEASURED,
    PROJECTED,
    ErrorsOfRuns,
    Line,
    errors_of_runs,
    measured_lines,
    medians,
    plain_rate,
    scaling_table,
    with_efficiency,
)
from .bench.table_text import markdown, short
from .bench.terminal import PipeConsole
from .cli import start
from .config.arguments import quoted
from .config.builders import ALONE, ORACLE, PLAIN, draft_configs
from .config.sampling import sampling_of
from .config.schema import Output, ScalingConfig
from .nodes import Leader, Nodes, follow, leading, ranks_of_a_node
from .running.jobs import folder_of_run, goes_on, relaunch
from .running.session import checked

LATE = ("parameters", "threads", "sampling")  # settings of a record that only its launch knows
OWN_KEYS = (
    "ranks",
    "tp",
    "runs",
    "project",
    "projected_ranks",
    "weak",
    "links",
    "methods",
    "out",
    "limit",
    "repeats",
    "output",
)


def scaling(config: ScalingConfig) -> None:
    """Measure or project methods over numbers of ranks, and write the table and its plots.

    Args:
        config: this job's config.

    Raises:
        ValueError: a value of the config is wrong, or a node is missing; the message names the remedy.
        SystemExit: a launch failed; the code is that of its ranks.
    """
    nodes = check(config)
    arguments = list(HydraConfig.get().overrides.task)
    if nodes.rank > 0:
        follow(nodes, arguments, config.parallel.timeout_s, partial(launch_benchmark, config, folder_of_run()))
        return
    folder = Path(config.out).absolute() if config.out else folder_of_run()
    check_folder(config, folder)
    if not config.out:
        print(goes_on(folder), file=sys.stderr, flush=True)
    models = ModelCache()
    with leading(nodes, arguments, config.parallel.timeout_s) as leader:
        folders = [folder / f"run-{number}" for number in range(1, config.runs + 1)] if config.runs > 1 else [folder]
        runs, captions = zip(*(run(config, leader, each, models) for each in folders), strict=True)
        lines = with_efficiency(medians(runs))
        missing = missing_methods(config, methods_of(config))
        left_out = "".join(f"\n{name} was left out: it {lacking}.\n" for name, lacking in missing.items())
        caption = f"{captions[0]}\n{fastest(lines)}{left_out}".rstrip("\n")
        report(lines, errors_of_runs(runs), caption, folder, config.output is Output.table)


def run(config: ScalingConfig, leader: Leader, folder: Path, models: ModelCache) -> tuple[list[Line], str]:
    """Measure and project once: on every number of ranks, with every way to split the model over them.

    Args:
        config: this job's config.
        leader: launches ranks on the run's nodes.
        folder: gets the records of each launch in a subfolder, as in ranks-2.
        models: holds the model that projections run on.

    Returns:
        The lines of the table, and its caption: hardware, model and settings.
    """
    lines: list[Line] = []
    caption = ""
    splits = splits_of(config)
    if splits:
        for ranks, tp in splits:
            leader.launch(ranks, partial(launch_benchmark, config, _folder_of(config, folder, ranks, tp)), tp=tp)
        found = {split: _records_of_one_setting(_folder_of(config, folder, *split)) for split in splits}
        alone = {tp: plain_rate(records) for (ranks, tp), records in found.items() if ranks == tp}
        for (_, tp), records in found.items():
            lines += measured_lines(records, alone.get(tp))
        every = [record for records in found.values() for record in records]
        caption = "; ".join([_caption(found[splits[-1]][0]), *remarks(every), *_baselines(alone, found)])
    if config.project:
        bench = open_bench(replace(config, methods=[LOOKAHEAD, PLAIN]), models)
        with _threads_of_a_rank(config):
            lines += project_all(config, bench)
        caption = caption or f"{os.cpu_count()} cores, torch {torch.__version__}, model {config.model.name}"
    return lines, caption


def check(config: ScalingConfig) -> Nodes:
    """Refuse a config that cannot be measured or projected, before anything is launched, and return the run's nodes.

    Args:
        config: this job's config.

    Raises:
        ValueError: names the key, the limit and the remedy.
    """
    if "WORLD_SIZE" in os.environ:
        raise UserError(f"lp scaling launches the ranks itself; start it alone: {app_command('scaling')}")
    if not config.ranks and not config.project:
        raise UserError("ranks is empty and project is false, which leaves nothing to do; give one of them")
    for key in ("ranks", "projected_ranks"):
        for ranks in getattr(config, key):
            check_int(key, ranks, 1, 1024, "give numbers of ranks, as in ranks=[1,2,4]")
    if config.project and not config.projected_ranks:
        raise UserError("projected_ranks is empty with project=true; give numbers of ranks, as in [1,2,4]")
    if config.project and not config.links:
        raise UserError("links is empty with project=true; keep one of the default ones, or give your own")
    methods = methods_of(config)
    decoder = config.decoder.name
    if decoder != LOOKAHEAD and not any(name in (decoder, decoder + ALONE) for name in methods):
        raise UserError(f"decoder is {decoder!r}, which methods={methods} does not run; add it to methods")
    if config.project and decoder != LOOKAHEAD:
        raise UserError(f"decoder is {decoder!r} with project=true, which projects decoder={LOOKAHEAD}; leave one out")
    if not config.tp:
        raise UserError("tp is empty; give ranks that hold a model between them, as in tp=[1,2]")
    for tp in config.tp:
        check_int("tp", tp, 1, 1024, "give ranks that hold a model between them, as in tp=[1,2]")
        if config.ranks and not any(ranks % tp == 0 for ranks in config.ranks):
            raise UserError(f"tp has {tp}, which divides none of ranks={config.ranks}; give a multiple of it there")
    for ranks in config.ranks:
        if not _methods(config, ranks):
            raise UserError(f"ranks has {ranks}, on which none of methods={methods} runs; give one more")
    if config.project and decoder == LOOKAHEAD:  # now, not when everything else has been measured
        check_projectable(draft_configs(config, [LOOKAHEAD])[LOOKAHEAD].shape())
    prompts, _, _ = checked(config, own_names(methods))
    if config.pass_at_1:
        check_pass_at_1(config, prompts)
    if config.quality:
        check_rouge(prompt.reference for prompt in prompts)
    for ranks, tp in splits_of(config):
        check_divisible(replace(config, parallel=replace(config.parallel, tp=tp)), _methods(config, ranks, tp))
    check_int("runs", config.runs, 1, 100, "give how often to measure and project")
    check_timeouts(config.parallel.timeout_s)
    nodes = Nodes.from_env()
    for ranks, _ in splits_of(config):
        nodes.check(ranks)
    return nodes


def check_folder(config: ScalingConfig, folder: Path) -> None:
    """Refuse a folder with records of other settings, before new records are measured into it.

    Args:
        config: this job's config.
        folder: where the records go.

    Raises:
        ValueError: names the setting that differs, and the folder.
    """
    folders = [folder / f"run-{number}" for number in range(1, config.runs + 1)] if config.runs > 1 else [folder]
    for each, (ranks, tp) in itertools.product(folders, splits_of(config)):
        place = _folder_of(config, each, ranks, tp)
        if not any(place.glob("*.jsonl")):
            continue
        found = _records_of_one_setting(place)[0]["settings"]
        of_launch = replace(config, parallel=replace(config.parallel, tp=tp))
        wanted = settings_of(of_launch, _methods(config, ranks, tp), sampling_of(config), ranks, 0)
        wanted = json.loads(json.dumps(wanted))
        known = {name for name in (*wanted, *found) if name not in LATE}  # the others are known when a launch runs
        differ = sorted(name for name in known if wanted.get(name) != found.get(name))
        if differ:
            name = differ[0]
            theirs, ours = short(found.get(name)), short(wanted.get(name))
            raise UserError(
                f"{place} has records with {name}={theirs}, and this run has {ours}; give another out=, or move them "
                "away"
            )


def splits_of(config: ScalingConfig) -> list[tuple[int, int]]:
    """The launches that a config needs, as (ranks, tp): first the baselines, then each number of ranks with each tp.

    Pairs in which tp does not divide the number of ranks are skipped. A baseline is plain decoding on one replica
    (model copy) alone, (tp, tp), by whose speed others are divided. A launch on which none of the methods can run is
    left out.

    Args:
        config: this job's config; `tp` is how many ranks hold a model between them.
    """
    wanted = [
        (ranks, tp) for ranks in config.ranks for tp in config.tp if ranks % tp == 0 and _methods(config, ranks, tp)
    ]
    alone = dict.fromkeys((tp, tp) for _, tp in wanted)
    return [*(split for split in alone if split not in wanted and _methods(config, *split)), *wanted]


def _folder_of(config: ScalingConfig, folder: Path, ranks: int, tp: int) -> Path:
    name = f"ranks-{ranks}" if ranks in config.ranks else f"plain-{ranks}"
    return folder / (name if tp == 1 else f"{name}-tp-{tp}")


def launch_benchmark(
    config: ScalingConfig, folder: Path, ranks: int, nproc: int, place: Sequence[str], tp: int = 1
) -> None:
    """Measure one number of ranks by `lp benchmark` in processes of its own; prompts that have records are skipped.

    Args:
        config: this job's config.
        folder: where rank 0 writes the records.
        ranks: world size: the ranks on all nodes together.
        nproc: ranks on this node.
        place: torchrun's options for meeting the other nodes.
        tp: how many of the ranks hold a model between them.
    """
    task = HydraConfig.get().overrides.task
    shared = [override for override in task if re.split("[.=]", override.lstrip("+~"))[0] not in OWN_KEYS]
    limit = "null" if config.limit is None else config.limit
    own = [f"methods=[{','.join(_methods(config, ranks, tp))}]", f"out={quoted(str(folder))}", f"limit={limit}"]
    own += [f"parallel.tp={tp}", f"repeats={config.repeats}"]  # the benchmark's own default is another
    relaunch(nproc, "benchmark", [*shared, *own, f"output={config.output}"], place)


def _methods(config: ScalingConfig, ranks: int, tp: int = 1) -> list[str]:
    """The methods that so many ranks can run here, without baselines whose package is missing.

    A launch that was added only as a baseline for speed-ups runs plain decoding, and beside it the method that
    `decoder` configures: the benchmark would refuse the keys of a decoder that none of its methods uses.
    """
    methods = methods_of(config)
    if ranks not in config.ranks:
        plain = [name for name in (PLAIN, ORACLE) if name in methods][:1]
        decoder = config.decoder.name
        needed = [] if decoder == LOOKAHEAD else [name for name in (decoder, decoder + ALONE) if name in methods][:1]
        return [*plain, *needed] if plain else []
    missing = missing_methods(config, methods)
    methods = [name for name in methods if name not in missing]
    if tp > 1:
        return [name for name in methods if name not in BASELINES]
    return [name for name in methods if ranks > 1 or not (name in BASELINES and BASELINES[name].all_ranks)]


def fastest(lines: Sequence[Line]) -> str:
    """A line for the caption: the method and split of the ranks that decode fastest.

    Empty if all measured lines have the same tp, the number of ranks that hold a model between them.

    Args:
        lines: the lines of the table.
    """
    measured = [line for line in lines if line.kind == MEASURED]
    if len({line.tp for line in measured}) < 2:
        return ""
    best = max(measured, key=lambda line: line.tokens_per_s)
    return f"\nfastest: {best.method}, lp {best.ranks // best.tp} x tp {best.tp}, {best.tokens_per_s:.1f} tokens/s\n"


def _records_of_one_setting(folder: Path) -> list[Record]:
    records = load_records(folder)
    if len({digest(record["settings"]) for record in records}) > 1:
        raise UserError(
            f"{folder} has records of other settings too, which the table cannot tell apart; give another out=, or "
            "move the other files away"
        )
    return records


@contextmanager
def _threads_of_a_rank(config: ScalingConfig) -> Iterator[None]:
    """Within the block, torch has as many CPU threads as each rank of the largest launch: see launch/torchrun.py."""
    threads = torch.get_num_threads()
    ranks = min(max(config.ranks, default=1), ranks_of_a_node() or math.inf)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(threads // ranks)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def report(lines: list[Line], off: ErrorsOfRuns, caption: str, folder: Path, table: bool) -> None:
    """Print the scaling table, or one JSON object; write scaling.csv, scaling.md and the plots into the folder.

    Args:
        lines: the lines of the table.
        off: by (method, ranks), the relative error of the projected speed-up in each run: 0.05 is 5% above the
            measured.
        caption: hardware, model and settings, printed below the table.
        folder: where the files go.
        table: whether to print the table; False prints JSON.
    """
    text = markdown(*scaling_table(lines)) + f"\n{caption}\n"
    for (method, ranks), each in off.items():
        text += f"\n{method} on {ranks} ranks: projected {', '.join(f'{error:+.1%}' for error in each)} off the "
        text += "measured speed-up"
        text += f" in {len(each)} runs, by {median(map(abs, each)):.1%} in the median.\n" if len(each) > 1 else ".\n"
    figures = [line.figures() for line in lines]
    try:
        if table:
            PipeConsole(width=200).print(text, markup=False, highlight=False)
        else:
            projected = sum(line.kind == PROJECTED for line in lines)
            counts = {MEASURED: len(lines) - projected, PROJECTED: projected}
            named = {f"{method}@{ranks}": each for (method, ranks), each in off.items()}
            print(json.dumps({"folder": str(folder), **counts, "errors": named, "lines": figures}), flush=True)
    finally:  # a reader that has left, or a disk that is full, must not take what was measured with it
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "scaling.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*figures[0]])
            writer.writeheader()
            writer.writerows(figures)
        (folder / "scaling.md").write_text(text, encoding="utf-8")
    scaling_plots(lines, caption, folder)
    if table:
        print(f"written to {folder}")


def _baselines(alone: Mapping[int, float | None], found: Mapping[tuple[int, int], Sequence[Record]]) -> list[str]:
    """Lines of the caption with the speed of plain decoding that speed-ups are over: alone, and in each launch.

    Args:
        alone: tokens/s of plain decoding alone, by tp.
        found: records by (ranks, tp).
    """
    said = []
    for tp, rate in alone.items():
        if rate:
            where = "one device" if tp == 1 else f"{tp} ranks that hold a model between them,"
            said.append(f"vs plain: over plain decoding on {where} with nothing else running, {rate:.1f} tokens/s")
    rates = {split: plain_rate(records) for split, records in found.items() if split[0] > split[1]}
    shared = []
    for (ranks, tp), rate in rates.items():
        if rate:
            shared.append(f"{rate:.1f} with {ranks} ranks" if tp == 1 else f"{rate:.1f} with {ranks} ranks, tp {tp}")
    if shared:
        said.append(f"{IN_LAUNCH}: over plain decoding in the same launch, {', '.join(shared)}")
    return said


def _caption(record: Record) -> str:
    """The line below the table: hardware, model and settings that all launches share."""
    settings = record["settings"]
    versions = record["versions"]
    shape = f"W={settings['W']} N={settings['N']} G={short(settings['G'])}"
    model = f"model {settings['model']} ({settings['parameters'] / 1e6:.1f} M parameters), {settings['dtype']}"
    return f"{record['hardware']}, torch {versions['torch']}, {model}, {shape}, task {settings['task']}"


if __name__ == "__main__":
    start("scaling", sys.argv[1:])
