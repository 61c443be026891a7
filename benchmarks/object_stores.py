"""Saves to an S3 server on loopback, and restores, beside the same bytes put and got by plain clients. Exit code 1 when
a bar is missed.

    python benchmarks/object_stores.py [--quick] [--dir DIR] [--rounds N] [--json FILE]

The server is SeaweedFS (the extra `dev` has it), which shares the cores with its clients. 512 MiB in 4 arrays, sharded
over 8 devices, are saved; the plain clients, s3fs and botocore, put and get as many objects of the same sizes, as many
at once. jaxckpt hashes all, commits, and puts the arrays back onto their devices besides. The peak of memory is that of
a process of its own with `max_host_bytes` of 64 MiB, above the arrays. `--scale` shrinks the arrays, to try the script
out: the bars are meant for the full size.
"""

import argparse
import concurrent.futures
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
import numpy as np
from _harness import (
    MIB,
    Figures,
    PeakMemory,
    Ratio,
    arguments,
    fresh_directory,
    in_child,
    interleave,
    medians,
    print_machine,
    print_table,
    records,
    show,
    use_cpu_devices,
    write_json,
)
from acceptance import Row, verdict
from pinned_vs_baseline import Workload, WrongValuesError, whole_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import stores

import jaxckpt
from jaxckpt import _location

AT_ONCE = 32
"""Requests in flight: as many as TensorStore makes for jaxckpt."""
HOST_BYTES = 64 * MIB
LEAST = 0.9

Transfer = Callable[[str, Sequence[bytes]], tuple[float, float]]
"""Puts objects below a prefix, gets and deletes them; the seconds of putting and getting."""


def workload(scale: float) -> Workload:
    return Workload("big", 4, whole_rows(round(128 * MIB * scale)), jax.device_count())


def save_and_restore(work: Workload, store: stores.Store, directory: Path, check: bool) -> Figures:
    url, options = store.url(uuid4().hex), store.storage_options
    tree = work.on_devices()
    began = time.perf_counter()
    jaxckpt.save(url, tree, storage_options=options)
    saved = time.perf_counter()
    found = jax.block_until_ready(jaxckpt.restore(url, work.like(), storage_options=options))
    restored = time.perf_counter()
    if check and not all(np.asarray(found[name]).tobytes() == leaf.tobytes() for name, leaf in work.host().items()):
        raise WrongValuesError("the arrays came back with other values")
    jaxckpt.delete(url, storage_options=options)
    return {"put_seconds": saved - began, "get_seconds": restored - saved}


def plain(transfer: Transfer, objects: Sequence[bytes], directory: Path, check: bool) -> Figures:
    put, got = transfer(uuid4().hex, objects)
    return {"put_seconds": put, "get_seconds": got}


def objects_of(work: Workload, store: stores.Store) -> list[bytes]:
    """What jaxckpt makes of the arrays: the same objects, but for names and records."""
    url, options = store.url(uuid4().hex), store.storage_options
    jaxckpt.save(url, work.on_devices(), storage_options=options)
    saved = _location.parse(url, options)
    found = [saved.read(name) for name, stat in saved.files().items() if stat.nbytes > 1 << 16]
    jaxckpt.delete(url, storage_options=options)
    return found


def by_s3fs(store: stores.Store) -> Transfer:
    import s3fs

    file_system = s3fs.S3FileSystem(
        key=store.key,
        secret=store.secret,
        endpoint_url=store.endpoint,
        client_kwargs={"region_name": stores.REGION},
        config_kwargs={"max_pool_connections": AT_ONCE},
    )

    def transfer(prefix: str, objects: Sequence[bytes]) -> tuple[float, float]:
        paths = [f"{store.bucket}/{prefix}/{number}" for number in range(len(objects))]
        began = time.perf_counter()
        file_system.pipe(dict(zip(paths, objects, strict=True)), batch_size=AT_ONCE)
        put = time.perf_counter()
        found: Any = file_system.cat(paths, batch_size=AT_ONCE)
        got = time.perf_counter()
        check_bytes([found[path] for path in paths], objects)
        file_system.rm(paths)
        return put - began, got - put

    return transfer


def by_botocore(store: stores.Store) -> Transfer:
    import botocore.config
    import botocore.session

    client = botocore.session.get_session().create_client(
        "s3",
        region_name=stores.REGION,
        endpoint_url=store.endpoint,
        aws_access_key_id=store.key,
        aws_secret_access_key=store.secret,
        config=botocore.config.Config(max_pool_connections=AT_ONCE, s3={"addressing_style": "path"}),
    )

    def transfer(prefix: str, objects: Sequence[bytes]) -> tuple[float, float]:
        keys = [f"{prefix}/{number}" for number in range(len(objects))]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            began = time.perf_counter()
            list(pool.map(lambda key, data: client.put_object(Bucket=store.bucket, Key=key, Body=data), keys, objects))
            put = time.perf_counter()
            found = list(pool.map(lambda key: client.get_object(Bucket=store.bucket, Key=key)["Body"].read(), keys))
            got = time.perf_counter()
            check_bytes(found, objects)
            list(pool.map(lambda key: client.delete_object(Bucket=store.bucket, Key=key), keys))
        return put - began, got - put

    return transfer


def check_bytes(found: Sequence[bytes], objects: Sequence[bytes]) -> None:
    if found != objects:
        raise WrongValuesError("the objects came back with other bytes")


CLIENTS: dict[str, Callable[[stores.Store], Transfer]] = {"s3fs": by_s3fs, "botocore": by_botocore}


def peaks(scale: float, store: stores.Store) -> Figures:
    """Memory above the arrays of a save and of a restore that may hold `HOST_BYTES`."""
    work, url, options = workload(scale), store.url(uuid4().hex), store.storage_options
    jaxckpt.save(f"{url}-first", {"v": np.ones(3)}, storage_options=options)  # the clients and their modules
    tree = work.on_devices()
    with PeakMemory() as saving:
        save_options = jaxckpt.SaveOptions(max_host_bytes=HOST_BYTES)
        jaxckpt.save(url, tree, options=save_options, storage_options=options)
    nbytes = work.device_bytes
    with PeakMemory() as restoring:
        restore_options = jaxckpt.RestoreOptions(max_host_bytes=HOST_BYTES)
        found = jaxckpt.restore(url, work.like(), options=restore_options, storage_options=options)
    del found
    return {"save_peak_bytes": saving.rise, "restore_peak_bytes": restoring.rise - nbytes}


def rows(found: dict[str, Figures], memory: Figures) -> list[Row]:
    ours = found["jaxckpt"]
    result = []
    for verb, what in (("put", "save"), ("get", "restore")):
        figure = f"{verb}_seconds"
        best = min(CLIENTS, key=lambda name: found[name][figure])
        detail = f"{show(figure, ours[figure])} / {show(figure, found[best][figure])}"
        what = f"{what}: time / {verb} by {best}, the faster client"
        result.append(Row("rate", what, "ratio", ours[figure] / found[best][figure], 1 / LEAST, detail))
    for verb in ("save", "restore"):
        what = f"{verb}: peak of memory, {show('_bytes', HOST_BYTES)} allowed"
        result.append(Row("memory", what, "peak_bytes", memory[f"{verb}_peak_bytes"]))
    return result


def measure(options: argparse.Namespace, store: stores.Store) -> tuple[list[Row], list[dict[str, Any]]]:
    work = workload(options.scale)
    objects = objects_of(work, store)
    turns = {"jaxckpt": partial(save_and_restore, work, store)}
    turns |= {name: partial(plain, client(store), objects) for name, client in CLIENTS.items()}
    samples = interleave(turns, options.rounds, options.dir, "rate")
    return rows(medians(samples), in_child(peaks, options.scale, store)), records("big", samples)


def main() -> int:
    parser = arguments("Saves to an S3 server on loopback beside plain clients.")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the arrays, to try the script out")
    parser.add_argument("--quick", action="store_true", help="a quarter of the bytes, 2 rounds")
    options = parser.parse_args()
    options.scale *= 0.25 if options.quick else 1.0
    options.rounds = options.rounds or (2 if options.quick else 5)
    if reason := stores.missing("weed"):
        print(reason)
        return 2
    use_cpu_devices(8)
    print_machine(options.dir)
    with fresh_directory(options.dir) as directory, stores.seaweedfs(directory) as server:
        store = stores.Store("s3", server.endpoint)  # without the process, so that a child may have it
        found, rounds = measure(options, store)
    print_table(
        "S3 on loopback",
        ["", "measured", "bar", "", ""],
        [
            [row.what, show(row.figure, row.measured), show(row.figure, row.most), verdict(row), row.detail]
            for row in found
        ],
    )
    if options.json:
        watched = {row.what: Ratio(row.measured) for row in found if row.figure == "ratio"}
        results = rounds + [asdict(row) | {"passed": row.passed} for row in found]
        write_json(options.json, "object_stores", options.dir, results, watched)
    return 0 if all(row.passed for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
