"""The benchmarks that answer threads of JAX users: they run, at sizes that tell nothing, and fail where they must."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxckpt

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

Run = Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]]


@pytest.fixture
def run_benchmark(tmp_path: Path) -> Run:
    """Runs a benchmark in one round under the test's directory; returns its process and its results."""

    def run(name: str, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        report = tmp_path / "report.json"
        common = ["--quick", "--dir", str(tmp_path), "--rounds", "1", "--json", str(report)]
        done = subprocess.run(
            [sys.executable, str(BENCHMARKS / name), *common, *options],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not list(tmp_path.glob("jaxckpt-bench-*"))
        return done, json.loads(report.read_text())["results"] if report.exists() else []

    return run


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def median(results: list[dict[str, Any]], case: str, variant: str, figure: str) -> float:
    wanted = (case, variant, figure)
    return next(r["median"] for r in results if (r.get("case"), r.get("variant"), r.get("figure")) == wanted)


HLO = """HloModule jit_solve, is_scheduled=true

%is_unfinished (a: f32[2]) -> pred[] {
  ROOT %any = pred[] all-reduce(%mine), channel_id=1, to_apply=%or
}

%apart (b: f32[2]) -> f32[2] {
  ROOT %sum = (f32[2]{0}, f32[2]{0}) all-reduce-start(%b), channel_id=2, to_apply=%add
}

%improve (c: (f32[2], pred[])) -> (f32[2], pred[]) {
  %next = f32[2]{0} fusion(%c), kind=kLoop, calls=%apart
  %flag = pred[] all-reduce(%c), channel_id=3, to_apply=%or
}

ENTRY %main (d: f32[2]) -> f32[2] {
  %done = (f32[2]{0}, pred[]) while(%d), condition=%is_unfinished, body=%improve
  ROOT %all = f32[16]{0} all-gather(%done), channel_id=4, dimensions={0}
}
"""


def test_collectives_are_counted_where_loops_wait_for_them() -> None:
    from _hlo import Collectives, collectives

    assert collectives(HLO) == Collectives(total=4, in_loops=3, of_predicates=2)
    assert collectives(HLO.replace("while(", "call(")) == Collectives(total=4, in_loops=0, of_predicates=0)


def test_sharding_vs_pmap_explains_the_gap_and_exchanges_states(run_benchmark: Run, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    done, results = run_benchmark("sharding_vs_pmap.py", "--scale", "0.05", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    case = "nested loops"
    assert median(results, case, "jit(vmap), sharded", "predicate_reductions_in_loops") == 2
    for form in ("vmap on one device", "pmap(vmap)", "shard_map(vmap)"):
        assert median(results, case, form, "collectives_in_loops") == 0
        assert median(results, case, form, "solve_to_shard_map_ratio") > 0
    told = next(result for result in results if "explanation" in result)
    assert told["equal_pairs"] == 16
    assert "jit(vmap), sharded reduces the predicate of a loop across all devices in 2 places" in told["explanation"]
    assert told["explanation"].count(". ") == 1
    assert told["explanation"] in done.stdout
    assert plot.exists() or "matplotlib is not installed" in done.stderr


def test_sharding_vs_pmap_fails_where_forms_differ_by_more_than_is_allowed(run_benchmark: Run) -> None:
    done, _ = run_benchmark("sharding_vs_pmap.py", "--scale", "0.05", "--tolerance", "-1")
    assert done.returncode == 1
    assert "the results differ by" in done.stderr


def test_sharding_vs_pmap_fails_where_a_form_gets_another_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sharding_vs_pmap as benchmark

    state, found = benchmark.first_state(2 * jax.device_count()), benchmark.forms(benchmark.solve)
    assert benchmark.check_forms("tiny", found, state, 1e-3, tmp_path) == len(found) ** 2
    honest = jaxckpt.restore

    def restore(path: Path, like: Any) -> Any:
        tree = honest(path, like)
        return tree | {"rate": tree["rate"] * 2}

    monkeypatch.setattr(benchmark.jaxckpt, "restore", restore)
    with pytest.raises(benchmark.WrongValuesError, match="into vmap on one device, rate: restored other bytes"):
        benchmark.check_forms("tiny", found, state, 1e-3, tmp_path / "again")


def test_data_parallel_compares_the_forms_and_exchanges_their_checkpoints(run_benchmark: Run) -> None:
    done, results = run_benchmark("data_parallel.py", "--scale", "0.1", "--processes", "2")
    assert done.returncode == 0, done.stderr
    for form in ("jit", "shard_map"):
        assert median(results, "training", form, "step_seconds") > 0
        assert median(results, "training", form, "collectives") >= 1
        assert median(results, "training", f"{form}, saving", "blocked_seconds") > 0
        assert median(results, "training", f"{form}, saving", "lost_seconds") != 0
    assert median(results, "training", "jit", "step_to_shard_map_ratio") > 0
    checks = {row["what"]: row["passed"] for row in results if "what" in row}
    expected = [f"loss: {name} beside jit" for name in ("shard_map", "jit, saving", "shard_map, saving")]
    expected += [f"next loss: {a} into {b}" for a in ("jit", "shard_map") for b in ("jit", "shard_map")]
    expected += [f"written / state: {form}, 8 replicas in 1 process" for form in ("jit", "shard_map")]
    expected += ["written / state: 2 replicas in 2 processes", "the busiest of 2 processes / state"]
    assert checks == dict.fromkeys(expected, True)


def test_data_parallel_fails_where_losses_differ_by_more_than_is_allowed(run_benchmark: Run) -> None:
    done, results = run_benchmark("data_parallel.py", "--scale", "0.1", "--processes", "0", "--tolerance", "-1")
    assert done.returncode == 1
    assert not any(row["passed"] for row in results if row.get("area") in ("losses", "exchange"))
    assert "MISSED" in done.stdout


def test_data_parallel_sees_a_wrong_loss_a_wrong_state_and_bytes_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import data_parallel as benchmark

    rows = benchmark.loss_rows({"jit": [2.0, 1.0], "shard_map": [2.0, 1.1], "mad": [2.0, float("nan")]}, 1e-4)
    assert [row.passed for row in rows] == [False, False]

    state = jax.device_put({"a": jax.numpy.ones((64, 64)), "b": jax.numpy.ones(3)}, benchmark.shardings()[0])
    info = jaxckpt.save(tmp_path / "right", state)
    assert benchmark.written_row("right", tmp_path / "right").passed
    twice = dataclasses.replace(info, indexes=info.indexes * jax.device_count())
    monkeypatch.setattr(benchmark.jaxckpt, "describe", lambda _: twice)
    assert not benchmark.written_row("each replica", tmp_path / "right").passed

    honest = jaxckpt.restore

    def restore(path: Path, like: Any) -> Any:
        tree = honest(path, like)
        return tree | {"step": tree["step"] + 1}

    monkeypatch.undo()
    monkeypatch.setattr(benchmark.jaxckpt, "restore", restore)
    with pytest.raises(benchmark.WrongValuesError, match=r"jit into jit, \['step'\]: restored other bytes"):
        benchmark.exchange_rows(benchmark.Model(8, 1, 1, 1), 1e-4, tmp_path)


def test_actor_learner_tells_what_transfers_and_saves_add_to_a_step(run_benchmark: Run, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    done, results = run_benchmark("actor_learner.py", "--scale", "0.2", "--cores", "1", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    saves = [f"save, {mode}" for mode in ("direct", "pinned", "staged")]
    for learner in ("alone", "384 transfers", "1 batched transfer", *saves):
        p50, p99, most = (median(results, "1 core", learner, f"{part}_seconds") for part in ("p50", "p99", "max"))
        assert 0 < p50 <= p99 <= most
        assert median(results, "1 core", learner, "p50_to_alone_ratio") > 0
        assert median(results, "1 core", learner, "idle_cores") <= 1.1
    rows = [row for row in results if "what" in row]
    assert [row["what"] for row in rows] == [f"1 core: p50 during {save} / alone" for save in saves]
    assert plot.exists() or "matplotlib is not installed" in done.stderr


def test_actor_learner_judges_a_save_only_where_there_are_cores_to_spare() -> None:
    import actor_learner as benchmark

    def row(ratio: float, idle: float) -> benchmark.Row:
        figures = {"p50_to_alone_ratio": [ratio], "idle_cores": [idle], "busy_cores": [1.5]}
        return benchmark.case_rows("4 cores", dict.fromkeys(benchmark.SAVES, figures))[0]

    assert [row(1.09, 2.0).passed, row(1.2, 2.0).passed, row(1.2, 0.4).passed] == [True, False, True]
    assert row(1.2, 2.0).detail == "cores to spare: 1.5 used by this process, 2.0 idle"
    assert benchmark.verdict(row(1.2, 0.4)) == ""
    assert row(1.2, 0.4).detail.startswith("none to spare")


def test_actor_learner_fails_where_other_bytes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import actor_learner as benchmark

    fetch = benchmark.Fetch(jax.device_put)
    fetch.check()
    wrong = benchmark.Fetch(lambda arrays, device: jax.device_put([*arrays[1:], arrays[0]], device))
    with pytest.raises(benchmark.WrongValuesError, match="array 0 of the rollout"):
        wrong.check()
    stays = benchmark.Fetch(lambda arrays, _: arrays)
    with pytest.raises(benchmark.WrongValuesError, match="array 0 of the rollout"):
        stays.check()

    save = benchmark.Save("pinned", 1 << 20, tmp_path)
    save.check()
    monkeypatch.setattr(benchmark.jaxckpt, "save", lambda *_, **__: None)
    save.cycle()
    with pytest.raises(benchmark.WrongValuesError, match="pinned, layer0: restored other bytes"):
        save.check()


def test_actor_learner_raises_what_the_learner_raised(tmp_path: Path) -> None:
    import actor_learner as benchmark

    class Failing(benchmark.Idle):
        def cycle(self) -> None:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        benchmark.run_both(lambda _: Failing(), benchmark.Load(0.01, 0), tmp_path, False)
