"""The command `jaxckpt`: argv -> options -> the blocking API, printed."""

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO, TypeVar, get_args

import click
import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

import jaxckpt
from jaxckpt import Leaf
from jaxckpt._files import check_dest, read_source, write_dest
from jaxckpt._options import Transfer

Made = TypeVar("Made")
OnProgress = Callable[[int, int], None]

_SAVE = jaxckpt.SaveOptions()
_RESTORE = jaxckpt.RestoreOptions()
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_COLUMNS = ("name", "shape", "dtype", "sharding", "bytes")
_SECONDS_BETWEEN_LINES = 5.0


def main() -> None:
    """Run the command line of this process, and exit."""
    # JAX is imported by now but has made no backend: converting files must not take an accelerator.
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    warnings.showwarning = _show_warning
    cli(prog_name="jaxckpt")


class _Commands(click.Group):
    """A group whose commands end with status 1 and one line on stderr where they fail."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output left; click ends quietly
        except (jaxckpt.CheckpointError, OSError, MemoryError) as error:
            click.echo(f"jaxckpt: error: {error}", err=True)
            ctx.exit(1)


def size(value: str | int) -> int:
    """Bytes, from a whole number or one with a binary unit."""
    if isinstance(value, int):
        return value
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", value)
    if parts is None or parts[2] not in _UNITS:
        raise click.BadParameter(f"{value!r} is not a size; expected bytes, or for example 256MiB or 1.5GiB")
    return int(float(parts[1]) * _UNITS[parts[2]]) if parts[2] else int(parts[1])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jaxckpt", prog_name="jaxckpt")
def cli() -> None:
    """Save and restore JAX checkpoints from and to files."""


@cli.command()
@click.argument("source")
@click.argument("checkpoint")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is there.")
@click.option(
    "--transfer",
    type=click.Choice(get_args(Transfer)),
    default=_SAVE.transfer,
    show_default=True,
    help="How a shard comes from the device.",
)
@click.option("--max-host-bytes", type=size, default=_SAVE.max_host_bytes, help="Memory for copies of the data.")
@click.option(
    "--pack-below-bytes",
    type=size,
    default=_SAVE.pack_below_bytes,
    show_default=True,
    help="Smaller shards share files.",
)
@click.option(
    "--chunk-bytes", type=size, default=_SAVE.chunk_bytes, show_default=True, help="The largest file of an array."
)
@click.option(
    "--timeout-seconds", type=float, default=_SAVE.timeout_seconds, show_default=True, help="Give up after this long."
)
@click.option("--verify-after-save", is_flag=True, help="Read all back, and compare it, before it is committed.")
@click.option("--trace-directory", type=click.Path(), help="Leave a file there that ui.perfetto.dev shows.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
def save(source: str, checkpoint: str, *, overwrite: bool, quiet: bool, **options: Any) -> None:
    """Save the file SOURCE (.safetensors, .npz, .npy) as CHECKPOINT, a directory or URL.

    A size is a number of bytes, or one with a unit: 256MiB, 1GiB.
    """
    save_options = _made(jaxckpt.SaveOptions, options)
    tree = read_source(source)
    begun = time.perf_counter()
    with progress("saving", quiet=quiet) as on_progress:
        info = jaxckpt.save(checkpoint, tree, overwrite=overwrite, options=save_options, on_progress=on_progress)
    if not quiet:
        click.echo(f"saved {source} to {checkpoint}: {_work(info, time.perf_counter() - begun)}")


@cli.command()
@click.argument("checkpoint")
@click.argument("dest")
@click.option("--overwrite", is_flag=True, help="Replace the file that is there.")
@click.option(
    "--verify/--no-verify", default=_RESTORE.verify, show_default=True, help="Check the hash of what is read."
)
@click.option("--max-host-bytes", type=size, default=_RESTORE.max_host_bytes, help="Memory beside the arrays.")
@click.option(
    "--timeout-seconds",
    type=float,
    default=_RESTORE.timeout_seconds,
    show_default=True,
    help="Give up after this long.",
)
@click.option("--quiet", is_flag=True, help="Print errors only.")
def restore(checkpoint: str, dest: str, *, overwrite: bool, quiet: bool, **options: Any) -> None:
    """Restore CHECKPOINT, a directory or URL, to the file DEST (.safetensors, .npz, .npy).

    A size is a number of bytes, or one with a unit: 256MiB, 1GiB.
    """
    restore_options = _made(jaxckpt.RestoreOptions, options)
    info = jaxckpt.describe(checkpoint)
    like = jax.tree.map(_on_host, info.tree)
    check_dest(dest, like, overwrite=overwrite)
    begun = time.perf_counter()
    with progress("restoring", quiet=quiet) as on_progress:
        tree = jaxckpt.restore(checkpoint, like, options=restore_options, on_progress=on_progress)
    write_dest(dest, tree, overwrite=overwrite)
    if not quiet:
        click.echo(f"restored {checkpoint} to {dest}: {_work(info, time.perf_counter() - begun)}")


@cli.command()
@click.argument("checkpoint")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of a table.")
@click.option("--processes", is_flag=True, help="List what each process wrote instead.")
def ls(checkpoint: str, *, as_json: bool, processes: bool) -> None:
    """List the leaves of CHECKPOINT. Only its manifest is read."""
    info = jaxckpt.describe(checkpoint)
    leaves = [_row(leaf) for leaf in info.leaves]
    written = [{"process": number, "bytes": index.written_nbytes} for number, index in enumerate(info.indexes)]
    if as_json:
        document = {"path": info.path, "created": info.created, "bytes": info.nbytes}
        click.echo(json.dumps({**document, "leaves": leaves, "processes": written}, indent=2))
        return
    columns = ("process", "bytes") if processes else _COLUMNS
    cells = [(str(row["process"]), f"{row['bytes']:,}") for row in written] if processes else map(_cells, leaves)
    (_print_table if sys.stdout.isatty() else _print_lines)(columns, list(cells))
    click.echo(_total(info))


@cli.command()
@click.argument("checkpoint")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of lines.")
@click.option("--quiet", is_flag=True, help="Print faults only.")
@click.pass_context
def verify(ctx: click.Context, checkpoint: str, *, as_json: bool, quiet: bool) -> None:
    """Read all of CHECKPOINT and compare it with its hashes. The exit status is 1 if anything is wrong."""
    with progress("verifying", quiet=quiet or as_json) as on_progress:
        report = jaxckpt.verify(checkpoint, on_progress=on_progress)
    damaged = [name for name, faults in report.by_leaf().items() if faults]
    if as_json:
        click.echo(json.dumps({**asdict(report), "ok": report.ok, "faults": _faults(report.faults)}, indent=2))
    else:
        for fault in report.faults:
            click.echo(f"damaged: {fault.problem}")
        if not report.ok:
            click.echo(f"{len(damaged)} of {len(report.leaves)} leaves damaged, {len(report.faults)} faults")
        elif not quiet:
            speed = decimal(int(report.nbytes / max(report.seconds, 1e-9)))
            click.echo(f"{checkpoint}: {len(report.leaves)} leaves, {decimal(report.nbytes)} verified ({speed}/s)")
    ctx.exit(0 if report.ok else 1)


@cli.command()
@click.argument("source")
@click.argument("dest")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is there.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
def copy(source: str, dest: str, *, overwrite: bool, quiet: bool) -> None:
    """Copy the checkpoint SOURCE to DEST, each a directory or URL, checking every hash.

    A copy that was broken off goes on where it was when it is made again.
    """
    begun = time.perf_counter()
    with progress("copying", quiet=quiet) as on_progress:
        info = jaxckpt.copy(source, dest, overwrite=overwrite, on_progress=on_progress)
    if not quiet:
        click.echo(f"copied {source} to {dest}: {_work(info, time.perf_counter() - begun)}")


@cli.command()
@click.argument("checkpoint")
def delete(checkpoint: str) -> None:
    """Remove CHECKPOINT: at once and as a whole."""
    jaxckpt.delete(checkpoint)


@cli.command()
@click.argument("root")
@click.option(
    "--grace-seconds",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    help="Keep what changed less long ago.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
def gc(root: str, *, grace_seconds: float, dry_run: bool) -> None:
    """Remove what killed saves have left in the checkpoints at and below ROOT."""
    report = jaxckpt.gc(root, grace_seconds=grace_seconds, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    for path in report.removed:
        click.echo(f"{verb} {path}")
    for path, reason in report.kept:
        click.echo(f"kept {path}: {reason}")
    click.echo(f"{verb} {len(report.removed)} leftovers, {decimal(report.nbytes)}")


def _faults(faults: Iterable[jaxckpt.Fault]) -> list[dict[str, str]]:
    return [{"leaf": fault.leaf, "file": fault.file, "problem": fault.problem} for fault in faults]


def _row(leaf: Leaf) -> dict[str, Any]:
    return {
        "name": leaf.name,
        "shape": list(leaf.shape),
        "dtype": _dtype(leaf),
        "sharding": str(leaf.sharding) if leaf.sharding is not None else None,
        "bytes": leaf.nbytes,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shape = ", ".join(map(str, row["shape"]))
    return row["name"], f"({shape})", row["dtype"], row["sharding"] or "-", f"{row['bytes']:,}"


def _print_table(columns: tuple[str, ...], cells: list[tuple[str, ...]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column == "bytes" else "left")
    for row in cells:
        table.add_row(*row)
    Console(markup=False, emoji=False, highlight=False).print(table)


def _print_lines(columns: tuple[str, ...], cells: list[tuple[str, ...]]) -> None:
    """One line a row, however long: for grep and awk."""
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in (columns, *cells):
        left = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        click.echo("  ".join([*left, row[-1].rjust(widths[-1])]))


def _dtype(leaf: Leaf) -> str:
    if leaf.value is not None:
        return f"Python {leaf.value.type}"
    return f"key<{leaf.impl}>" if leaf.kind == "key" else leaf.dtype


def _on_host(leaf: Any) -> Any:
    """A numpy array to restore `leaf` into that takes no memory; keys and Python values as they are."""
    if not isinstance(leaf, jax.ShapeDtypeStruct) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _made(make: Callable[..., Made], options: dict[str, Any]) -> Made:
    try:
        return make(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _total(info: jaxckpt.CheckpointInfo) -> str:
    count = len(info.leaves)
    return f"{count} {'leaf' if count == 1 else 'leaves'}, {decimal(info.nbytes)}"


def _work(info: jaxckpt.CheckpointInfo, seconds: float) -> str:
    return f"{_total(info)} in {seconds:.2f} s ({decimal(int(info.nbytes / seconds))}/s)"


@contextmanager
def progress(verb: str, *, quiet: bool) -> Generator[OnProgress | None]:
    """What to tell of the progress: a bar on a terminal, a line now and then elsewhere, all on stderr."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn(verb), *columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(verb, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _lines(verb)


def _lines(verb: str) -> OnProgress:
    begun = printed = time.perf_counter()

    def show(done: int, total: int) -> None:
        nonlocal printed
        now = time.perf_counter()
        if now - printed >= _SECONDS_BETWEEN_LINES:
            printed = now
            click.echo(f"{verb}: {decimal(done)} of {decimal(total)}, {decimal(int(done / (now - begun)))}/s", err=True)

    return show


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: TextIO | str | None
) -> None:
    click.echo(f"jaxckpt: warning: {message}", err=True)
