"""Mutation testing: plant the faults of tests/mutants.jsonl one by one, and see which the tests find.

    python scripts/mutants.py                           # all that the ledger has not
    python scripts/mutants.py --only lp/draft/          # of these files alone
    python scripts/mutants.py --survivors               # those that survived, again
    python scripts/mutants.py --report                  # the table of the ledger alone

Works on a copy of the tree in a temporary folder. A mutant is killed if a test that it names fails or takes too long.
The result is kept by mutant, and by what its file says, so that a run that is stopped goes on, and one after a change
runs the mutants of the files that changed; new tests need --survivors. Compiled functions run as Python: compiling
takes a minute a mutant.
Ends with one JSON line. Exit code 1 where a mutant that is not listed as equivalent survived, or where tests fail
without a mutant, too; then their mutants are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/mutants.jsonl"
COPIED = ("lp", "launch", "conf", "docs", "scripts", "tests", "pyproject.toml", "README.md", "torchrun.sh")
LIMIT_S = 900  # for tests without a mutant
LEAST_LIMIT_S, SLOWER = 60, 4  # a mutant's tests may take so long at least, and so many times as long as without it
PRELOADED = ["numba", "pytest", "torch", "transformers.modeling_utils"]  # seconds of every run
SERVER = multiprocessing.get_context("forkserver")
KILLED, SURVIVED, EQUIVALENT = "killed", "survived", "equivalent"
NO_END = "no end within"  # how the reason of a test begins that was stopped: a busy machine may be one, too


def main() -> None:
    """Run what is asked for."""
    arguments = _arguments()
    mutants = [json.loads(line) for line in LIST.read_text(encoding="utf-8").splitlines()]
    results = _read(arguments.ledger)
    all_ran = True
    if not arguments.report:
        chosen = [mutant for mutant in mutants if mutant["path"].startswith(arguments.only)]
        if arguments.survivors:
            chosen = [mutant for mutant in chosen if results.get(key(mutant), {}).get("result") == SURVIVED]
        elif not arguments.again:
            chosen = [mutant for mutant in chosen if key(mutant) not in results]
        chosen = [mutant for mutant in chosen if "equivalent" not in mutant]
        all_ran = _run_all(chosen[: arguments.most], results, arguments.ledger)
    sys.exit(max(_report(mutants, results), not all_ran))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledger", type=Path, default=ROOT / "mutants_ledger.jsonl", help="file of results")
    parser.add_argument("--only", default="", help="how the paths begin")
    parser.add_argument("--most", type=int, help="so many mutants")
    parser.add_argument("--survivors", action="store_true", help="those that survived, again")
    parser.add_argument("--again", action="store_true", help="those that the ledger has, too")
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args()


def key(mutant: dict[str, Any]) -> str:
    """A digest of the mutant and of its file."""
    source = (ROOT / mutant["path"]).read_text(encoding="utf-8")
    return hashlib.blake2b("\0".join((mutant["old"], mutant["new"], source)).encode(), digest_size=8).hexdigest()


def _read(ledger: Path) -> dict[str, dict[str, Any]]:
    """The ledger's lines by mutant; one that was cut off is left out."""
    whole = ledger.read_text(encoding="utf-8").rpartition("\n")[0] if ledger.exists() else ""
    return {line["mutant"]: line for line in map(json.loads, whole.splitlines())}


def _run_all(mutants: Sequence[dict[str, Any]], results: dict[str, dict[str, Any]], ledger: Path) -> bool:
    """Plant each in a copy of the tree, and write to the ledger what came of it; False: tests fail without any."""
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    SERVER.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            _copy(ROOT / name, tree / name)
        limits: dict[tuple[str, ...], float | None] = {}  # seconds; None: the tests fail without a mutant, too
        for number, mutant in enumerate(mutants, 1):
            tests = tuple(mutant["tests"])
            if tests not in limits:
                started = time.monotonic()
                failing = _failing_test(tree, tests, LIMIT_S)
                if failing:
                    print(f"{', '.join(tests)}: {failing} fails without any mutant, too; not run with one", flush=True)
                limits[tests] = None if failing else max(SLOWER * (time.monotonic() - started), LEAST_LIMIT_S)
            if (limit_s := limits[tests]) is None:
                continue
            started = time.monotonic()
            source = (ROOT / mutant["path"]).read_text(encoding="utf-8")
            (tree / mutant["path"]).write_text(source.replace(mutant["old"], mutant["new"]), encoding="utf-8")
            failing = _failing_test(tree, tests, limit_s)
            (tree / mutant["path"]).write_text(source, encoding="utf-8")
            line = {
                "mutant": key(mutant),
                "path": mutant["path"],
                "result": KILLED if failing else SURVIVED,
                "by": failing,
                "seconds": round(time.monotonic() - started),
            }
            results[line["mutant"]] = line
            with ledger.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{number} of {len(mutants)}: {line['result']}: {mutant['path']}: {mutant['new']}", flush=True)
        return None not in limits.values()


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _failing_test(tree: Path, tests: Sequence[str], limit_s: float) -> str | None:
    """The first of these tests that fails, or what else ended them; None where all pass."""
    output = tree / "output.txt"
    process = SERVER.Process(target=_run_tests, args=(tree, [f"tests/{test}" for test in tests], output, limit_s))
    process.start()
    assert process.pid
    process.join(limit_s)
    in_time = process.exitcode is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the tests left running goes, too
    process.join()
    if not in_time:
        return f"{NO_END} {limit_s:.0f} s"
    if process.exitcode == 0:
        return None
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].removeprefix("tests/") if failed else f"pytest ended with {process.exitcode}"


def _run_tests(tree: Path, files: Sequence[str], output: Path, limit_s: float) -> None:
    """Run tests on a mutant, in a process that has imported all that no mutant changes, which saves seconds."""
    signal.alarm(int(limit_s) + 10)  # where the script itself has been killed, nobody else ends it
    os.setpgid(0, 0)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ.update({"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"})
    os.environ.pop("LP_TEST_LONG", None)  # a mutant must die in the tests that run each time
    sys.dont_write_bytecode = True
    with output.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-rfE"]
    code = importlib.import_module("pytest").main([*options, *files])
    sys.stdout.flush()
    os._exit(int(code))


def _report(mutants: Sequence[dict[str, Any]], results: dict[str, dict[str, Any]]) -> int:
    """Print a table by file, those planted by hand, and the survivors; returns the exit code."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    survivors = []
    stopped = 0
    for mutant in mutants:
        line = results.get(key(mutant))
        stopped += bool(line and (line["by"] or "").startswith(NO_END))
        result = EQUIVALENT if "equivalent" in mutant else line["result"] if line else "not run"
        counts[mutant["path"]][result] += 1
        counts["all"][result] += 1
        if result == SURVIVED:
            survivors.append(mutant)
    columns = (KILLED, SURVIVED, EQUIVALENT, "not run")
    print("| file | mutants |", " | ".join(columns), "|")
    print("|---|---|", "|".join("---" for _ in columns), "|", sep="")
    for path in [*sorted(counts.keys() - {"all"}), "all"]:
        own = counts[path]
        print(f"| {path} | {sum(own.values())} |", " | ".join(str(own[column]) for column in columns), "|")
    print("\n| fault planted by hand | file | found by |\n|---|---|---|")
    for mutant in mutants:
        if "planted" in mutant:
            line = results.get(key(mutant)) or {}
            print(f"| {mutant['planted']} | `{mutant['path']}` | `{line.get('by') or line.get('result', 'not run')}` |")
    for mutant in survivors:
        print(f"\nsurvived: {mutant['path']}\n- {mutant['old']}\n+ {mutant['new']}")
    total = counts["all"]
    judged = total[KILLED] + total[SURVIVED]
    print(f"\n{stopped} were killed by the time limit alone")
    print(json.dumps({"table": "mutants", **total, "killed_share": round(total[KILLED] / max(judged, 1), 4)}))
    return 1 if survivors else 0


if __name__ == "__main__":
    main()
