"""The benchmarks run, at sizes that say nothing about speed, so that they cannot rot."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import stores

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PEERS = ("jax", "jax-zarr3", "orbax", "safetensors")

Run = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]


@pytest.fixture
def run_benchmark(tmp_path: Path) -> Run:
    """Runs a benchmark in one round under the test's directory; returns its process and its JSON."""

    def run(name: str, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        report = tmp_path / "report.json"
        common = ["--dir", str(tmp_path), "--rounds", "1", "--scale", "0.002", "--json", str(report)]
        done = subprocess.run(
            [sys.executable, str(BENCHMARKS / name), *common, *options],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert report.exists(), done.stderr
        return done, json.loads(report.read_text())

    return run


def test_pinned_vs_baseline_measures_every_mode_beside_the_raw_write(run_benchmark: Run, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    options = ["--sizes", "1", "--shards", "2", "--variants", "staged", "auto", "raw", "--plot", str(plot)]
    done, report = run_benchmark("pinned_vs_baseline.py", *options)
    assert done.returncode == 0, done.stderr
    assert "auto, durable" in done.stdout
    measured = {(r["case"], r["variant"], r["figure"]) for r in report["results"]}
    for case in ("big", "small", "1 MiB / 2"):
        assert ((case, "raw", "durable_seconds") in measured) == (case in ("big", "small"))
        for figure in (
            "blocked_seconds",
            "durable_seconds",
            "restore_seconds",
            "save_peak_bytes",
            "restore_peak_bytes",
        ):
            assert {(case, "staged", figure), (case, "auto", figure)} <= measured
    legs = {variant for case, variant, figure in measured if figure == "leg_gigabytes_per_second"}
    assert legs == {"staged", "pinned, one by one", "pinned, overlapped", "one large copy"}
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["jax"] == jax.__version__
    assert plot.exists() or "matplotlib is not installed" in done.stderr
    assert not list(tmp_path.glob("jaxckpt-bench-*"))


def test_pinned_vs_baseline_runs_the_peers_that_are_installed(run_benchmark: Run) -> None:
    options = ["--sizes", "--variants", "auto", *PEERS]
    done, report = run_benchmark("pinned_vs_baseline.py", *options)
    assert done.returncode == 0, done.stderr
    measured = {record["variant"] for record in report["results"]}
    for peer in PEERS:
        assert peer in measured or f"{peer}: skipped" in done.stderr


def test_acceptance_puts_a_verdict_beside_every_bar(run_benchmark: Run) -> None:
    areas = ["mapped", "reads", "memory", "stalls", "leaves"]
    done, report = run_benchmark("acceptance.py", "--only", *areas)
    rows = report["results"]
    assert {row["area"] for row in rows} == set(areas)
    assert all(row["measured"] is not None for row in rows)
    assert done.stdout.count("pass") + done.stdout.count("MISSED") >= sum(row["most"] is not None for row in rows)
    assert done.returncode == (0 if all(row["passed"] for row in rows) else 1), done.stderr


def test_a_variant_that_restores_wrong_values_fails_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pinned_vs_baseline as benchmark

    def restore_doubled(path: Path, like: benchmark.Like) -> benchmark.Tree:
        return jax.tree.map(lambda array: array * 2, benchmark.restore_jaxckpt(path, like))

    honest = benchmark.VARIANTS["auto"]
    workload = benchmark.Workload("tiny", 2, 4096 * jax.device_count(), jax.device_count())
    for name in ("honest", "wrong"):
        (tmp_path / name).mkdir()
    benchmark.save_and_restore(honest, workload, True, tmp_path / "honest", True)
    wrong = benchmark.Variant("wrong", "", honest.begin, restore_doubled)
    with pytest.raises(benchmark.WrongValuesError, match="wrong, tiny, layer00000: other values on"):
        benchmark.save_and_restore(wrong, workload, True, tmp_path / "wrong", True)


def test_many_processes_measures_the_talk_and_the_growth_of_the_records(run_benchmark: Run) -> None:
    done, report = run_benchmark("many_processes.py", "--processes", "1", "4")
    assert done.returncode == 0, done.stderr
    measured = {(row["figure"], row["processes"]) for row in report["results"]}
    assert {("durable_seconds", 4), ("manifest_bytes", 1), ("commit_seconds", 4), ("restore_seconds", 4)} <= measured


def test_lost_step_time_compares_the_loops_and_the_adapters(run_benchmark: Run) -> None:
    done, report = run_benchmark("lost_step_time.py")
    rows = [row for row in report["results"] if "what" in row]
    measured = {(record["variant"], record["figure"]) for record in report["results"] if "variant" in record}
    for variant in ("no save", "jaxckpt", "orbax", "jax"):
        assert (variant, "lost_seconds") in measured or f"{variant}: skipped" in done.stderr
    assert {"loop", "adapters"} == {row["area"] for row in rows}
    assert sum(row["most"] is not None for row in rows) == 3
    assert done.returncode == (0 if all(row["passed"] for row in rows) else 1), done.stderr


def test_object_stores_compares_jaxckpt_with_plain_clients(run_benchmark: Run) -> None:
    if reason := stores.missing("weed"):
        pytest.skip(reason)
    done, report = run_benchmark("object_stores.py")
    rows = [row for row in report["results"] if "what" in row]
    measured = {(row["variant"], row["figure"]) for row in report["results"] if "variant" in row}
    clients = ("jaxckpt", "s3fs", "botocore")
    assert measured == {(client, f"{verb}_seconds") for client in clients for verb in ("put", "get")}
    assert {row["area"] for row in rows} == {"rate", "memory"}
    assert all(row["measured"] is not None for row in rows)
    assert done.returncode == (0 if all(row["passed"] for row in rows) else 1), done.stderr


def test_h2d_sharded_compares_what_is_no_view(run_benchmark: Run, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    done, report = run_benchmark("h2d_sharded.py", "--plot", str(plot))
    rows = [row for row in report["results"] if "what" in row]
    measured = {(row["case"], row["variant"]) for row in report["results"] if "variant" in row}
    for way in ("device_put", "one device after the other", "all devices overlapped"):
        assert ("rows over 8, unaligned", way) in measured
        assert {("rows over 8, aligned", f"{way}: a view"), ("rows over 8, aligned", f"{way}, then a copy")} <= measured
    for target in ("Device", "NamedSharding", "SingleDeviceSharding"):
        assert ("one device, unaligned", f"device_put, {target}") in measured
    assert not any(way.startswith("put_sharded") and "view" in way for _, way in measured)
    assert not any(": a view" in row["detail"] for row in rows)
    assert report["ratios"] == {row["what"]: {"value": row["measured"], "better": "smaller"} for row in rows}
    assert done.returncode == (0 if all(row["passed"] for row in rows) else 1), done.stderr
    assert plot.exists() or "matplotlib is not installed" in done.stderr
