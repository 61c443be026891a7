"""The keeper of the benchmarks names what got worse, and nothing else; the GPU script runs, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run

    return run


def ratios(better: str = "smaller", **values: float | None) -> dict[str, dict[str, Any]]:
    return {name: {"value": value, "better": better} for name, value in values.items()}


def test_a_ratio_that_got_worse_by_more_than_the_tolerance_is_named_with_both_values(keeper: Any) -> None:
    before, now = ratios(save=1.0, restore=1.0), ratios(save=1.8, restore=1.4)
    assert keeper.complaints(before, now, 0.5) == ["save: 1.8, it was 1; smaller is better"]
    before, now = ratios("larger", rate=4.0), ratios("larger", rate=2.0)
    assert keeper.complaints(before, now, 0.5) == ["rate: 2, it was 4; larger is better"]


def test_a_smaller_tolerance_finds_more(keeper: Any) -> None:
    assert keeper.complaints(ratios(save=1.0), ratios(save=1.2), 0.1)
    assert not keeper.complaints(ratios(save=1.0), ratios(save=1.2), 0.5)


def test_an_improvement_and_a_new_ratio_pass(keeper: Any) -> None:
    assert not keeper.complaints(ratios(save=1.0), ratios(save=0.1, restore=9.0), 0.5)
    assert not keeper.complaints(ratios("larger", rate=4.0), ratios("larger", rate=40.0), 0.5)


def test_a_ratio_near_zero_may_vary_by_the_slack(keeper: Any) -> None:
    assert not keeper.complaints(ratios(lost=0.0), ratios(lost=0.04), 0.5)
    assert keeper.complaints(ratios(lost=0.0), ratios(lost=0.06), 0.5)


def test_a_ratio_that_is_missing_or_was_not_measured_is_named(keeper: Any) -> None:
    assert keeper.complaints(ratios(save=1.0), {}, 0.5) == ["save: not measured; it was 1"]
    assert keeper.complaints(ratios(save=1.0), ratios(save=None), 0.5) == ["save: not measured; it was 1"]
    assert not keeper.complaints(ratios(save=None), ratios(save=1.0), 0.5)


def test_ratios_are_found_in_rows_and_in_records_where_a_benchmark_names_none(keeper: Any) -> None:
    import _harness

    rows = [
        {"what": "lost / other", "figure": "ratio", "measured": 0.4},
        {"case": "big", "variant": "auto", "figure": "step_ratio", "median": 0.9, "rounds": [0.9]},
        {"case": "big", "variant": "auto", "figure": "save_seconds", "median": 3.0, "rounds": [3.0]},
    ]
    assert _harness.ratios_in(rows) == {
        "lost / other": _harness.Ratio(0.4),
        "big: auto, step_ratio": _harness.Ratio(0.9),
    }


def keep(results: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = {"many_processes": ["--scale", "0.001", "--processes", "1", "2"]}
    return subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "run.py"), "--only", "many_processes", "--results", str(results)),
            *("--dir", str(results), "--rounds", "1", "--arguments", json.dumps(arguments), *options),
        ],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def git(directory: Path, *command: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *command], cwd=directory, check=True, capture_output=True)


def test_a_run_appends_a_line_and_is_checked_against_the_last_committed_one(tmp_path: Path) -> None:
    file = tmp_path / "many_processes.jsonl"
    git(tmp_path, "init")
    first = keep(tmp_path, "--check")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "many_processes: nothing to compare with" in first.stdout
    line = json.loads(file.read_text())
    assert line["versions"]["jaxckpt"]
    assert line["machine"]["cores"] >= 1
    name = "10 leaves: manifest: 2 processes / 1"
    line["ratios"][name]["value"] /= 2
    file.write_text(json.dumps(line) + "\n")
    git(tmp_path, "add", file.name)
    git(tmp_path, "commit", "-m", "better than it is")
    file.write_text("")
    second = keep(tmp_path, "--check")
    assert second.returncode == 1, second.stdout + second.stderr
    assert f"worse: many_processes: {name}: " in second.stdout
    assert second.stdout.count("worse: ") == 1
    assert len(file.read_text().splitlines()) == 1


def check_gpu_script(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--cpu", "--scale", "0.0005"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--json", str(report), *options],
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert report.exists(), done.stderr
    return done, json.loads(report.read_text())["results"]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (["transfers", "start_save", "put_sharded"], "to the host: pinned, overlapped / staged"),
        (["donation", "host_copies", "limit"], "2 GiB with 1 GB of pinned memory: leaves that differ"),
        (["peers", "lost", "resident"], "2 GiB: restore / the slower of reading and putting"),
    ],
)
def test_the_gpu_script_runs_on_the_cpu_and_loses_no_bytes(tmp_path: Path, steps: list[str], says: str) -> None:
    done, results = check_gpu_script(tmp_path, "--only", *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results[0]["note"].startswith("no GPU was at hand")
    figures = {result["what"]: result for result in results if "what" in result}
    assert says in figures
    counts = [figure for figure in figures.values() if figure["unit"] == ""]
    assert all(figure["met"] for figure in counts), counts
    assert [result["step"] for result in results if "error" in result] == steps


def test_a_step_that_takes_too_long_is_ended_and_named_and_the_next_one_is_too(tmp_path: Path) -> None:
    done, results = check_gpu_script(tmp_path, "--only", "donation", "limit", "--seconds", "0.5")
    assert done.returncode == 1, done.stderr
    errors = [result["error"] for result in results if "error" in result]
    assert len(errors) == 2
    assert all(error.startswith("took more than 0 s") for error in errors)


def test_a_step_that_fails_is_told_from_one_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    for code, says in ((0, ""), (3, "exit code 3")):
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], start_new_session=True)
        assert gpu_check._wait(process, 60) == says


def test_a_figure_meets_its_target_between_the_least_and_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_check import Figure

    assert Figure("rate", "GB/s", 2.0).met is None
    assert [Figure("rate", "x", value, least=0.9).met for value in (0.89, 0.9)] == [False, True]
    assert [Figure("warnings", "", value, least=1, most=1).met for value in (0, 1, 2)] == [False, True, False]
    assert Figure("not measured", "x", float("nan"), least=0.9).met is False
