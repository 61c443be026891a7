"""Keep the benchmarks from getting worse: run all of them in their quick form and compare their ratios.

    python benchmarks/run.py [--check] [--only NAME ...] [--tolerance FRACTION] [--dir DIR] [--rounds N]

Each run appends one line to `benchmarks/results/<name>.jsonl`: when, versions, machine and the named ratios of the
benchmark (see `write_json`). Times are not kept, because another machine has others. `--check` compares with the last
line that is committed and exits with 1, naming every ratio that got worse by more than the tolerance or was not
measured; a benchmark that fails is named too. A run that is as it should be is committed to become the next yardstick.

Ratios vary as well, on a machine with few cores or other work by half: hence the tolerance, and a slack of 0.05 for
ratios near zero.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCHMARKS: dict[str, list[str]] = {
    "pinned_vs_baseline": ["--quick"],
    "lost_step_time": ["--quick"],
    "many_processes": ["--scale", "0.1", "--processes", "1", "16"],
    "object_stores": ["--quick"],
    "h2d_sharded": ["--quick"],
    "data_parallel": ["--quick"],
    "sharding_vs_pmap": ["--quick"],
    "actor_learner": ["--quick"],
}
"""Benchmark -> the arguments of its quick form. `acceptance.py` has none: its bars are meant for the full size."""
SLACK = 0.05

Ratios = Mapping[str, Mapping[str, Any]]
"""Name -> `value`, None where it was not measured, and `better`: `smaller` or `larger`."""


def complaints(before: Ratios, now: Ratios, tolerance: float) -> list[str]:
    """What got worse by more than `tolerance`, a fraction, and what is no longer measured."""
    found = []
    for name, old in before.items():
        new = now.get(name, {}).get("value")
        if new is None:
            found.append(f"{name}: not measured; it was {_show(old['value'])}")
        elif old["value"] is not None and _is_worse(old["value"], new, old["better"], tolerance):
            found.append(f"{name}: {_show(new)}, it was {_show(old['value'])}; {old['better']} is better")
    return found


def _is_worse(old: float, new: float, better: str, tolerance: float) -> bool:
    if better == "smaller":
        return new > old * (1 + tolerance) + SLACK
    return new < old / (1 + tolerance) - SLACK


def _show(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"


def run(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What the benchmark reports, or None where it fails. Missing a bar of its own is no failure here."""
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        report = Path(directory) / "report.json"
        common = ["--dir", directory, "--json", str(report)]
        if options.rounds:
            common += ["--rounds", str(options.rounds)]
        command = [sys.executable, str(HERE / f"{name}.py"), *options.arguments.get(name, BENCHMARKS[name]), *common]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
        try:
            subprocess.run(command, env=environment, check=False, timeout=options.timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        return json.loads(report.read_text()) if report.exists() else None


def entry(report: Mapping[str, Any], arguments: list[str]) -> dict[str, Any]:
    """The line that is kept of a report."""
    return {
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arguments": arguments,
        "versions": report["versions"],
        "machine": report["machine"],
        "ratios": report["ratios"],
    }


def append(file: Path, line: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def last_committed(file: Path) -> dict[str, Any] | None:
    """The last line of `file` as it was committed, or None where it never was."""
    shown = subprocess.run(
        ["git", "show", f"HEAD:./{file.name}"], cwd=file.parent, capture_output=True, text=True, check=False
    )
    return json.loads(shown.stdout.splitlines()[-1]) if shown.returncode == 0 and shown.stdout.strip() else None


def check(name: str, before: Mapping[str, Any] | None, now: Mapping[str, Any], tolerance: float) -> list[str]:
    """Compare two lines of a benchmark, and say what the comparison is worth."""
    if before is None:
        print(f"{name}: nothing to compare with; commit its line")
        return []
    for what in ("arguments", "machine", "versions"):
        if before[what] != now[what]:
            print(f"{name}: the {what} were others when its last line was taken, {before['taken']}")
    return [f"{name}: {complaint}" for complaint in complaints(before["ratios"], now["ratios"], tolerance)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run all benchmarks in their quick form and keep their ratios.")
    parser.add_argument("--check", action="store_true", help="compare with the last committed lines")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument(
        "--tolerance", type=float, default=0.5, help="how much worse a ratio may get, a fraction (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where the lines are kept")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="write here: a real disk")
    parser.add_argument("--rounds", type=int, help="rounds behind every median (default: those of the quick form)")
    parser.add_argument("--timeout-seconds", type=float, default=1800.0, help="of each benchmark")
    parser.add_argument(
        "--arguments", type=json.loads, default={}, metavar="JSON", help="other arguments, a list by benchmark"
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    wrong: list[str] = []
    for name in options.only:
        if not (HERE / f"{name}.py").exists():
            print(f"{name}: skipped, there is no {name}.py")
            continue
        report = run(name, options)
        if report is None:
            wrong.append(f"{name}: failed, or took more than {options.timeout_seconds:.0f} s")
            continue
        now = entry(report, options.arguments.get(name, BENCHMARKS[name]))
        file = options.results / f"{name}.jsonl"
        if options.check:
            wrong += check(name, last_committed(file), now, options.tolerance)
        append(file, now)
    for complaint in wrong:
        print(f"worse: {complaint}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
