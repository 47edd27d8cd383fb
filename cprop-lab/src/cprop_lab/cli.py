"""The command line: ``cprop-lab``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = ["app"]

app = typer.Typer(
    name="cprop-lab",
    help="Run the paper's experiments, or find out whether CProp helps your own training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

# Slow imports (torch, matplotlib, Ray) are left to the commands that need them, so that --help is quick.


class PresetName(StrEnum):
    """How long experiments run."""

    paper = "paper"
    reduced = "reduced"
    smoke = "smoke"


class Executor(StrEnum):
    """What executes the runs."""

    ray = "ray"
    process = "process"


class Tracker(StrEnum):
    """Tools that curves can be exported to."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"
    wandb = "wandb"


Extensions = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="MODULE",
        help="A module of your own that registers optimizers, importable from this folder (see docs/own-task.md).",
    ),
]
Storage = Annotated[
    str,
    typer.Option(
        envvar="CPROP_LAB_STORAGE", help="Where results are kept: a folder, or an address such as s3://bucket/path."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the data sets (fashion_mnist/, cifar100/, ...). Default: $CPROP_LAB_DATA; if it is not set, "
        "they are downloaded.",
    ),
]
Preset = Annotated[
    PresetName,
    typer.Option(help="How long to run: as in the paper, hours on 2 cores, or minutes to check that it works."),
]
Address = Annotated[str | None, typer.Option(help="Address of a Ray cluster. Default: start Ray on this machine.")]
ExecutorOption = Annotated[
    Executor, typer.Option(help="'process' runs one after the other in this process, without Ray.")
]
Cpus = Annotated[int, typer.Option(help="CPU cores per run; as many runs as fit are executed in parallel.")]
Gpus = Annotated[float, typer.Option(help="GPUs per run (may be fractional).")]
Checkpoints = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-seconds",
        min=0,
        help="Seconds between two checkpoints of a run. Default: 30, or more if writing them took over a twentieth.",
    ),
]
TimeLimit = Annotated[
    float | None, typer.Option(min=0, help="Minutes after which to stop, as Ctrl-C does; the same command continues.")
]
WaitForWorkers = Annotated[
    float, typer.Option(min=0, max=525_600, help="Minutes to wait while a cluster has no machine that can hold a run.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be run, and what it costs.")]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Also write the verdicts to this file, if it is stopped or fails, too."
    ),
]
Eager = Annotated[bool, typer.Option("--eager", help="Do not compile CProp's step: slower, but needs no C++ compiler.")]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print our own errors as one sentence, without a traceback; Ctrl-C is not an error."""
    from cprop_lab.engine import ResultsLostError, RunsFailedError, SweepInterruptedError

    codes: dict[type[Exception], int] = {RunsFailedError: 3, ResultsLostError: 4}  # see docs/lab.md
    try:
        yield
    except (SweepInterruptedError, KeyboardInterrupt):
        console.print("Stopped. Finished work is kept; run the same command again to continue.", style="yellow")
        raise typer.Exit(130) from None
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get("CPROP_LAB_DEBUG"):
            raise
        console.print(f"Error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(codes.get(type(error), 1)) from None


def _interruptible(minutes: float | None) -> None:
    """Let SIGTERM, which queues and Kubernetes send, interrupt this process as Ctrl-C does; and a time limit."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if minutes is not None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 60 * minutes)


def _use(data: Path | None) -> None:
    """Read data sets from a folder, in this process and in those it starts."""
    from cprop_lab.workloads.data import ENVIRONMENT

    if data is not None:
        os.environ[ENVIRONMENT] = str(data.absolute())


def _load(extensions: list[str] | None) -> None:
    """Import modules of the user's own."""
    from cprop_lab.registry import load

    load(extensions or ())


def _experiment(name: str) -> Any:
    """An experiment by its name."""
    from cprop_lab.experiments import EXPERIMENTS

    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}: 'cprop-lab list' shows all of them")
    return EXPERIMENTS[name]


def _engine(
    storage: str,
    data: Path | None,
    address: str | None,
    executor: Executor,
    eager: bool,
    limits: Any,
) -> Any:
    from cprop_lab.engine.engine import Engine
    from cprop_lab.engine.live_table import LiveTable
    from cprop_lab.store import Store

    _use(data)
    compiler = os.environ.get("CXX", "g++")
    if not eager and shutil.which(compiler) is None:
        raise ValueError(
            f"no C++ compiler {compiler!r} found, which torch needs to compile CProp's step: install one (Debian: "
            "apt install g++), set the environment variable CXX to yours, or pass --eager"
        )
    return Engine(Store(storage), executor.value, address, limits, eager, progress=LiveTable(console))


def _filled(storage: str) -> Any:
    """A store to read from."""
    from cprop_lab.store import Store

    store = Store(storage)
    if store.empty():
        raise ValueError(
            f"{storage} holds no results: give --storage a folder that has some, or run an experiment first"
        )
    return store


def _command() -> str:
    """This command, to be repeated by others; this machine's folders and addresses are omitted."""
    words: list[str] = []
    skip = False
    for word in sys.argv[1:]:
        if skip or word.startswith(("--data=", "--storage=", "--address=")):
            skip = False
            continue
        if word in ("--data", "--storage", "--address"):
            skip = True
            continue
        words.append(word)
    return shlex.join(["cprop-lab", *words])


@app.command("list")
def list_experiments(extensions: Extensions = None) -> None:
    """List the experiments: one for each figure of the paper, and some beyond it."""
    from cprop_lab.experiments import EXPERIMENTS, PRESETS
    from cprop_lab.output.tables import Table

    with plain_errors():
        _load(extensions)
    rows = [[experiment.name, experiment.figure, experiment.title] for experiment in EXPERIMENTS.values()]
    console.print(Table(["experiment", "paper", "what it shows"], rows))
    for preset in PRESETS.values():
        console.print(f"--preset {preset.name}: {preset.about}", highlight=False)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment; see 'cprop-lab list'.")],
    preset: Preset = PresetName.smoke,
    extensions: Extensions = None,
    storage: Storage = "results",
    data: Data = None,
    optimizers: Annotated[
        str | None, typer.Option(help="Only these optimizers, with and without CProp; for example sgd,adam.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds. Default: the preset's.")] = None,
    select: Annotated[
        bool | None,
        typer.Option(
            "--select/--paper-rates", help="Select learning rates by the paper's procedure, or use the paper's."
        ),
    ] = None,
    address: Address = None,
    executor: ExecutorOption = Executor.ray,
    cpus: Cpus = 1,
    gpus: Gpus = 0.0,
    eager: Eager = False,
    checkpoint_seconds: Checkpoints = None,
    wait_for_workers: WaitForWorkers = 15.0,
    time_limit: TimeLimit = None,
    dry_run: DryRun = False,
    out: Json = None,
) -> None:
    """Run an experiment, or continue it, and draw its figure. Finished runs are reused."""
    from cprop_lab.engine.limits import Limits
    from cprop_lab.experiments import PRESETS

    with plain_errors():
        _load(extensions)
        chosen = _experiment(experiment)
        if optimizers is not None:
            chosen = chosen.only(optimizers.split(","))
        length = PRESETS[preset.value]
        if seeds is not None:
            length = replace(length, seeds=seeds)
        if dry_run:
            _use(data)
            _print_plan(chosen.plan(length, select), lambda run: chosen.run(length, run, select), storage, eager)
            return
        _interruptible(time_limit)
        limits = Limits(cpus, gpus, checkpoint_seconds=checkpoint_seconds, wait_for_workers=wait_for_workers)
        engine = _engine(storage, data, address, executor, eager, limits)
        name = f"{experiment}-{preset.value}"
        runs = _run_and_keep(chosen, length, select, engine, name, _recorded(engine, out))
        if out is not None:
            _write_verdicts(out, list(runs.values()))
        _show(engine.store, name, lambda ids: [runs[one] for one in ids])
    console.print(f"All experiments on one page: cprop-lab report --storage {storage}", highlight=False, soft_wrap=True)
    if preset is PresetName.smoke:
        console.print("The smoke preset checks that everything works; it says nothing about CProp.", style="yellow")


def _run_and_keep(
    experiment: Any, length: Any, select: bool | None, engine: Any, name: str, execute: Callable[[list[Any]], list[Any]]
) -> dict[str, Any]:
    """Run an experiment, keep its manifest, and return its runs by id, those that selected learning rates included."""
    runs: dict[str, Any] = {}

    def run_all(specifications: list[Any]) -> list[Any]:
        done = execute(specifications)
        runs.update((one.run_id, one) for one in done)
        return done

    def keep(manifest: dict[str, Any]) -> None:
        engine.store.write_experiment(name, {**manifest, "command": _command()})

    def begun(manifest: dict[str, Any], specifications: list[Any]) -> None:
        # So that 'plot' and 'report' can show the finished part of a long experiment.
        keep({**manifest, "runs": list(engine.by_id(specifications)), "timings": []})

    keep(experiment.run(length, run_all, select, begun, engine.progress))
    return runs


def _print_plan(plan: Any, protocol: Callable[[Any], object], storage: str, eager: bool) -> None:
    """How many runs there are, how many are still to be run, and what those cost: at least and at most."""
    from cprop_lab.experiments.costs import costs
    from cprop_lab.output.tables import Table
    from cprop_lab.store import Store

    planned, missing = costs(plan, protocol, Store(storage), eager)

    def cells(of: Any, value: Callable[[Any], float], form: str = ",") -> list[str]:
        return [f"{value(cost):{form}}" for cost in of]

    rows = [
        ["runs", *cells(planned, lambda cost: cost.runs)],
        ["of which to be run", *cells(missing, lambda cost: cost.runs)],
        ["their iterations", *cells(missing, lambda cost: cost.iterations)],
        ["10^15 operations", *cells(missing, lambda cost: cost.flops / 1e15, ",.3g")],
        ["MB of results", *cells(missing, lambda cost: cost.stored_bytes / 1e6, ",.3g")],
    ]
    console.print(Table(["planned", "at least", "at most"], rows))
    if planned.least.runs < planned.most.runs:
        console.print("A search for a learning rate goes on while the best rate is at an end of those tried.")


def _recorded(engine: Any, path: Path | None) -> Callable[[list[Any]], list[Any]]:
    """What executes runs; if it fails or is stopped, it writes the verdicts on those that are finished."""
    from cprop_lab.engine import SweepInterruptedError

    def execute(specifications: list[Any]) -> list[Any]:
        wanted = list(engine.by_id(specifications)) if path is not None else []
        try:
            return list(engine.run(specifications))
        except (Exception, KeyboardInterrupt) as error:
            if path is not None:
                stopped = isinstance(error, (SweepInterruptedError, KeyboardInterrupt))
                _write_verdicts(path, engine.store.runs(wanted), "stopped" if stopped else "failed", str(error))
            raise

    return execute


def _write_verdicts(path: Path, runs: Sequence[Any], ended: str = "finished", error: str = "") -> None:
    """Verdicts and run ids, for programs, and how the command ended."""
    from cprop_lab.analysis.pairs import pairs
    from cprop_lab.analysis.verdict import verdict

    verdicts = {name: asdict(verdict(name, pair)) for name, pair in pairs(runs).items()}
    ids = sorted(run.run_id for run in runs)
    about = {"command": _command(), "ended": ended, "error": error, "verdicts": verdicts, "runs": ids}
    path.write_text(json.dumps(about, indent=2) + "\n")


def _show(store: Any, name: str, read: Callable[[Iterable[str]], list[Any]], folder: Path | None = None) -> None:
    """Draw an experiment's figures, and print its verdicts or scores; its runs may have been read already."""
    from cprop_lab.analysis.pairs import pairs_of
    from cprop_lab.analysis.scoreboard import scores
    from cprop_lab.output import tables
    from cprop_lab.output.drawing import save
    from cprop_lab.output.figures import draw
    from cprop_lab.store.builds import mixed

    manifest = store.experiments()[name]
    runs = read(manifest["runs"])
    target = folder or store.local("figures") or Path("figures")
    target.mkdir(parents=True, exist_ok=True)
    timings = read(manifest.get("timings", ()))
    for suffix, figure in draw(manifest, runs, timings).items():
        path = target / f"{name}{suffix}.png"
        save(figure, path)
        console.print(f"Figure: {path}", highlight=False, soft_wrap=True)
    if entries := scores(manifest, runs, timings):
        console.print(tables.scoreboard(entries))
    elif found := pairs_of(manifest, runs):
        _print_verdicts(found, tables=False)
    elif manifest["kind"] == "rates" and runs:
        console.print(tables.final_values(runs))
    elif manifest["kind"] == "learning-rates":
        for optimizer, lr in manifest["learning_rates"].items():
            console.print(f"Learning rate of {optimizer}: {lr:g}", highlight=False, soft_wrap=True)
    _print_note(mixed([*runs, *timings]))


def _print_verdicts(found: Any, tables: bool) -> None:
    """Whether CProp helps, one optimizer after the other, and what limits the answer."""
    from cprop_lab.analysis.verdict import verdict
    from cprop_lab.output.tables import Table, folded

    verdicts = [verdict(name, pair) for name, pair in found.items()]
    for one in verdicts:
        if tables:
            console.print()
        console.print(folded(one.headline, console.width), style="bold", markup=False, highlight=False)
        if tables:
            console.print(Table(one.headings, one.rows))
    for note in dict.fromkeys(note for one in verdicts for note in one.notes):
        _print_note(note)


def _print_note(note: str) -> None:
    """A remark that limits what is above it, if there is one."""
    from cprop_lab.output.tables import folded

    if note:
        console.print(folded(f"Note: {note}", console.width), style="yellow", markup=False, highlight=False)


@app.command()
def plot(
    experiment: Annotated[str | None, typer.Argument(help="Name of an experiment. Default: all that were run.")] = None,
    extensions: Extensions = None,
    storage: Storage = "results",
    out: Annotated[Path | None, typer.Option(help="Folder for the figures. Default: figures/ in the storage.")] = None,
) -> None:
    """Draw the figures of experiments from stored results, without running anything."""
    with plain_errors():
        _load(extensions)
        store = _filled(storage)
        names = [n for n, manifest in store.experiments().items() if experiment in (None, manifest["experiment"], n)]
        if not names:
            raise ValueError(
                f"no results of {experiment or 'any experiment'} in {storage}: run it first, see 'cprop-lab list'"
            )
        for name in names:
            _show(store, name, store.runs, out)


@app.command()
def report(
    extensions: Extensions = None,
    storage: Storage = "results",
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page on all experiments: figures, verdicts, and how each run was made."""
    from cprop_lab.output.report import write

    with plain_errors():
        _load(extensions)
        write(_filled(storage), out)
    console.print(f"Written: {out}", highlight=False, soft_wrap=True)


@app.command()
def compare(
    task: Annotated[
        str,
        typer.Argument(
            help="Your task as module:Class, importable from this folder (see docs/own-task.md), or a workload."
        ),
    ],
    optimizers: Annotated[
        str, typer.Option(help="Optimizers to compare, separated by commas; docs/lab.md lists them.")
    ] = "sgd,adam",
    iterations: Annotated[int, typer.Option(min=10, help="Iterations of the runs that are compared.")] = 5_000,
    selection_iterations: Annotated[
        int, typer.Option(min=1, help="Iterations of the runs that select a learning rate; at most --iterations.")
    ] = 5_000,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds; use at least three to tell a difference from chance.")
    ] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 32,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples per evaluation, of the training and of the test data.",
            show_default="10,000; for a text 20 windows",
        ),
    ] = None,
    extensions: Extensions = None,
    storage: Storage = "results",
    data: Data = None,
    out: Annotated[Path, typer.Option(help="File for the figure, .png or .svg.")] = Path("comparison.png"),
    address: Address = None,
    executor: ExecutorOption = Executor.ray,
    cpus: Cpus = 1,
    gpus: Gpus = 0.0,
    eager: Eager = False,
    checkpoint_seconds: Checkpoints = None,
    wait_for_workers: WaitForWorkers = 15.0,
    time_limit: TimeLimit = None,
    dry_run: DryRun = False,
    mix_builds: Annotated[
        bool, typer.Option("--mix-builds", help="Also compare runs made with different builds of torch, with a note.")
    ] = False,
    written: Json = None,
) -> None:
    """Does CProp help my training? Select learning rates, train with and without CProp, and print a verdict."""
    from cprop_lab import workloads
    from cprop_lab.engine.limits import Limits
    from cprop_lab.experiments import comparison
    from cprop_lab.run.specification import Specification

    with plain_errors():
        _load(extensions)
        specification = Specification(
            task,
            "sgd",
            lr=1.0,
            batch_size=batch_size,
            iterations=iterations,
            evaluate_every=max(1, iterations // 50),
            examples=examples or workloads.build(task, {}, batch_size).examples,
        )
        bases = optimizers.split(",")
        protocol = partial(
            comparison.compare, specification, bases, seeds=seeds, selection_iterations=selection_iterations
        )
        if dry_run:
            _use(data)
            plan = comparison.planned(specification, bases, seeds, selection_iterations)
            _print_plan(plan, protocol, storage, eager)
            return
        _interruptible(time_limit)
        limits = Limits(cpus, gpus, checkpoint_seconds=checkpoint_seconds, wait_for_workers=wait_for_workers)
        engine = _engine(storage, data, address, executor, eager, limits)
        engine.one_build = not mix_builds
        found = protocol(_recorded(engine, written), progress=engine.progress)
        if written is not None:
            _write_verdicts(written, found.runs)
        _show_comparison(found, task, out)


def _show_comparison(found: Any, task: str, out: Path) -> None:
    """Draw a comparison's curves, and print the learning rates that it selected and its verdicts."""
    from cprop_lab.output.drawing import save
    from cprop_lab.output.figures import curves
    from cprop_lab.output.tables import final_values
    from cprop_lab.run.evaluation import METRICS
    from cprop_lab.store import measured
    from cprop_lab.store.builds import mixed

    told = any(measured(found.runs, metric) for metric in METRICS)
    panels = ("train_loss", "accuracy" if told else "test_loss", "mean_scale")
    save(curves(found.runs, panels, title=task), out)
    console.print()
    for base, selection in found.selections.items():
        tried = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in selection.losses.items())
        console.print(
            f"Learning rate of {base}: {selection.lr:g} (training loss by learning rate: {tried})", highlight=False
        )
    _print_verdicts(found.pairs, tables=True)
    _print_note(mixed(found.everything))
    if len(found.selections) > len(found.pairs):
        console.print("\nAll of them, those that CProp cannot wrap included:", style="bold")
        console.print(final_values(found.runs))
    console.print(f"\nFigure: {out}", highlight=False, soft_wrap=True)


@app.command()
def cost(
    experiment: Annotated[
        str | None, typer.Argument(help="Name of an experiment. Default: all of the paper's.")
    ] = None,
    preset: Preset = PresetName.paper,
    extensions: Extensions = None,
    data: Data = None,
    tflops: Annotated[float, typer.Option(help="Sustained speed of a device, in 10^12 operations per second.")] = 5.0,
    overhead: Annotated[
        float,
        typer.Option(
            help="Milliseconds per iteration that do not depend on the device: kernel launches, data loading."
        ),
    ] = 3.0,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the counts to this file.")
    ] = None,
) -> None:
    """Estimate the cost of experiments from operations counted on real steps."""
    from rich.progress import track

    from cprop_lab.experiments import EXPERIMENTS, PRESETS
    from cprop_lab.output.tables import Table
    from cprop_lab.run.cost import estimate
    from cprop_lab.run.identity import run_id

    with plain_errors():
        _load(extensions)
        _use(data)
        papers = [one for one in EXPERIMENTS.values() if one.kind != "scoreboard"]
        chosen = [_experiment(experiment)] if experiment else papers
        planned = {one.name: one.planned(PRESETS[preset.value]) for one in chosen}
        counting = track(planned.items(), "counting", console=console, transient=True)
        found = {name: estimate(runs) for name, runs in counting}
        once = {run_id(run): run for runs in planned.values() for run in runs}
        found["all, each run once"] = estimate(once.values())
        headings = ["experiment", "runs", "iterations", "10^15 operations", "hours on one device"]
        console.print(Table(headings, [[name, *one.cells(tflops, overhead)] for name, one in found.items()]))
        console.print(
            f"The hours assume {tflops:g} x 10^12 operations per second and {overhead:g} ms of overhead per iteration; "
            "they are not measured.",
            highlight=False,
        )
        if out is not None:
            counts = {name: asdict(one) for name, one in found.items()}
            about = {"command": _command(), "tflops": tflops, "overhead_ms": overhead, "experiments": counts}
            out.write_text(json.dumps(about, indent=2) + "\n")


@app.command()
def pack(storage: Storage = "results") -> None:
    """Put each experiment into one Parquet file, to commit it or to pass it on; all commands read it as before."""
    with plain_errors():
        files = _filled(storage).pack()
    for name, runs in files.items():
        console.print(f"{name}.parquet: {runs} runs", highlight=False)


@app.command()
def check(
    storage: Annotated[str, typer.Argument(help="A folder, or an address such as s3://bucket/path.")],
    mend: Annotated[
        bool,
        typer.Option(
            "--mend", help="Move what is damaged to the folder damaged/; the next 'cprop-lab run' runs it again."
        ),
    ] = False,
) -> None:
    """Read everything in a storage and list what is damaged: each run's id, its checksum, and that it can be read."""
    with plain_errors():
        damaged = _filled(storage).check(mend)
        for line in damaged:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"{len(damaged)} damaged" + ", moved to damaged/ unless a newer version's" * (mend and bool(damaged))
        )
    raise typer.Exit(int(bool(damaged) and not mend))


@app.command()
def export(
    to: Annotated[Tracker, typer.Option(help="Tool to export to.")],
    target: Annotated[
        str, typer.Option(help="TensorBoard: a folder; MLflow: a tracking URI; Weights & Biases: a project.")
    ],
    extensions: Extensions = None,
    storage: Storage = "results",
) -> None:
    """Export the curves of all finished runs to TensorBoard, MLflow or Weights & Biases."""
    from cprop_lab.output.trackers import export as send

    with plain_errors():
        _load(extensions)
        runs = _filled(storage).runs()
        send(runs, to.value, target)
    console.print(f"Exported {len(runs)} runs to {to.value}.")
