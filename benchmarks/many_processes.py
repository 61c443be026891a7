"""What it costs that many processes commit one checkpoint.

Two parts. The overhead of talking: real JAX processes on this machine save an empty tree
together, beside one process that saves it alone. The growth of the records: the files that
1 to 256 processes would write for 10,000 leaves, each sharded over all of them, are written,
fsynced, committed and restored by one process, each with real data, hashes and index files.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from _harness import (
    Ratio,
    arguments,
    fresh_directory,
    print_machine,
    print_table,
    show,
    use_cpu_devices,
    write_json,
)

import jaxckpt
from jaxckpt import _commit, _location
from jaxckpt._manifest import (
    FORMAT_VERSION,
    File,
    Index,
    IndexFile,
    Leaf,
    Manifest,
    Node,
    Piece,
    Timings,
    digest,
    encode_index,
)

ELEMENTS = 4
"""Of each leaf, in each process: the data are small, so that the records are what is measured."""


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the number of leaves, to try the script out")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="to simulate")
    parser.add_argument("--child", nargs=4, metavar=("ADDRESS", "COUNT", "INDEX", "PATH"), help=argparse.SUPPRESS)
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    if options.child:
        return save_empty(*options.child, rounds=options.rounds)
    use_cpu_devices(1)
    print_machine(options.dir)
    results = [*overhead(options), *growth(options)]
    print_table(
        "many processes",
        ["figure", "processes", "measured"],
        [[row["what"], str(row["processes"]), show(row["figure"], row["value"])] for row in results],
    )
    if options.json:
        write_json(options.json, "many_processes", options.dir, results, ratios(results))
    return 0


def ratios(results: list[dict]) -> dict[str, Ratio]:
    """How the bytes of the records grow with the processes: of the most simulated, by those of the fewest."""
    found: dict[str, dict[int, float]] = {}
    for row in results:
        if row["figure"].endswith("_bytes"):
            found.setdefault(row["what"], {})[row["processes"]] = row["value"]
    return {f"{what}: {max(by)} processes / {min(by)}": Ratio(by[max(by)] / by[min(by)]) for what, by in found.items()}


def overhead(options: argparse.Namespace) -> list[dict]:
    """The median time of a save of an empty tree, by number of real processes."""
    return [
        {
            "what": "save of an empty tree",
            "processes": count,
            "figure": "durable_seconds",
            "value": _time_empty(count, options.rounds, options.dir),
        }
        for count in (1, 2, 4)
    ]


def _time_empty(count: int, rounds: int, parent: Path) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with fresh_directory(parent) as directory:
        common = [sys.executable, __file__, "--rounds", str(rounds), "--child", address, str(count)]
        started = [
            subprocess.Popen([*common, str(index), str(directory)], stdout=subprocess.PIPE, text=True)
            for index in range(count)
        ]
        told = [process.communicate(timeout=300)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"a process failed: {told}")
    return max(float(text) for text in told)


def save_empty(address: str, count: str, index: str, path: str, *, rounds: int) -> int:
    """What each of the real processes does; prints the median."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(index))
    seconds = []
    for number in range(4 * rounds):
        began = time.perf_counter()
        jaxckpt.save(Path(path) / str(number), {})
        seconds.append(time.perf_counter() - began)
    print(statistics.median(seconds[rounds:]))
    return 0


def growth(options: argparse.Namespace) -> list[dict]:
    """Sizes of records and times of commit and restore, by number of simulated processes."""
    leaves = max(10, round(10_000 * options.scale))
    results = []
    for count in options.processes:
        with fresh_directory(options.dir) as directory:
            figures = _simulate(_location.parse(directory / "checkpoint"), count, leaves)
        results += [
            {"what": f"{leaves:,} leaves: {what}", "processes": count, "figure": figure, "value": value}
            for what, figure, value in figures
        ]
    return results


def _simulate(root: _location.Location, count: int, leaves: int) -> list[tuple[str, str, float]]:
    attempt = _commit.Attempt(root, overwrite=False)
    attempt.begin()
    began = time.perf_counter()
    indexes = [_write_share(attempt.data, process, leaves) for process in range(count)]
    written = time.perf_counter() - began
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        attempt=attempt.id,
        created=attempt.created,
        versions={},
        tree=[Node(type="list", children=list(range(leaves)))],
        leaves=[_leaf(number, count) for number in range(leaves)],
        indexes=indexes,
        timings=Timings(),
    )
    began = time.perf_counter()
    for directory in attempt.directories([]):
        attempt.sync(directory)
    attempt.publish(manifest)
    committed = time.perf_counter() - began
    began = time.perf_counter()
    one = jaxckpt.restore(root.path, [np.zeros(count * ELEMENTS, np.int32)] * leaves)
    restored = time.perf_counter() - began
    expected = np.repeat(np.arange(count, dtype=np.int32), ELEMENTS) * leaves + leaves - 1
    np.testing.assert_array_equal(one[-1], expected)
    return [
        ("manifest", "manifest_bytes", os.path.getsize(Path(root.path) / "manifest.json")),
        ("index files", "indexes_bytes", sum(index.nbytes for index in indexes)),
        ("what each process tells the first", "message_bytes", max(map(_message_bytes, indexes))),
        ("all index and data files, one after the other", "write_seconds", written),
        ("commit", "commit_seconds", committed),
        ("restore of all in one process", "restore_seconds", restored),
    ]


def _write_share(data: _location.Location, process: int, leaves: int) -> IndexFile:
    """The pack and the index of one process: its part of every leaf."""
    values = np.repeat(np.arange(leaves, dtype=np.int32) + process * leaves, ELEMENTS).reshape(leaves, ELEMENTS)
    pack = data.child(f"packs/{process}-0")
    pack.make()
    pack.write("c.0", values.tobytes())
    pieces = [
        Piece(
            leaf=leaf,
            start=(process * ELEMENTS,),
            shape=(ELEMENTS,),
            file=0,
            offset=leaf * values[leaf].nbytes,
            hashes=[digest(values[leaf])],
        )
        for leaf in range(leaves)
    ]
    encoded = encode_index(Index(files=[File(name=f"packs/{process}-0/c.0", nbytes=values.nbytes)], pieces=pieces))
    name = f"index-{process}.json"
    data.write(name, encoded)
    pack.sync([pack.path, data.path])
    return IndexFile(name=name, nbytes=len(encoded), hash=digest(encoded), written_nbytes=values.nbytes)


def _leaf(number: int, count: int) -> Leaf:
    return Leaf(name=f"{number}", kind="numpy", shape=(count * ELEMENTS,), dtype="int32")


def _message_bytes(index: IndexFile) -> int:
    return len(json.dumps({"name": index.name, "nbytes": index.nbytes, "hash": index.hash, "w": index.written_nbytes}))


if __name__ == "__main__":
    sys.exit(main())
