"""The command line: ``cprop-lab``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

__all__ = ["app"]

app = typer.Typer(
    name="cprop-lab",
    help="The paper's experiments, and whether CProp helps your own training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

# What takes seconds to import (torch, matplotlib, Ray), the command that needs it imports: --help must be quick.


class PresetName(StrEnum):
    """How long experiments run."""

    paper = "paper"
    reduced = "reduced"
    smoke = "smoke"


class Executor(StrEnum):
    """Who runs the runs."""

    ray = "ray"
    process = "process"


class Sink(StrEnum):
    """Where curves can be sent."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"
    wandb = "wandb"


Storage = Annotated[
    str, typer.Option(envvar="CPROP_LAB_STORAGE", help="Where results are kept: a folder, or s3://... and the like.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="A folder with the data sets (fashion_mnist/, cifar100/, ...); default $CPROP_LAB_DATA, and without it "
        "they are downloaded by their public names.",
    ),
]
Preset = Annotated[PresetName, typer.Option(help="How long: the paper's programme, what 2 cores can do, or minutes.")]
Address = Annotated[str | None, typer.Option(help="Of a Ray cluster; without it Ray is started on this machine.")]
ExecutorOption = Annotated[
    Executor, typer.Option(help="'process' runs one after the other, here, and does without Ray.")
]
Cpus = Annotated[int, typer.Option(help="Cores a run; as many runs go on at once as there is room for.")]
Gpus = Annotated[float, typer.Option(help="GPUs a run, or a part of one.")]
Eager = Annotated[bool, typer.Option("--eager", help="Without compiled steps: slower, and needs no C++ compiler.")]


@contextmanager
def plain_errors() -> Iterator[None]:
    """An error of ours is a sentence for a person, and Ctrl-C is no error."""
    from cprop_lab.engine import SweepInterruptedError

    try:
        yield
    except SweepInterruptedError:
        console.print("Stopped. What is finished is kept, and the same command goes on where it was.", style="yellow")
        raise typer.Exit(130) from None
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get("CPROP_LAB_DEBUG"):
            raise
        console.print(f"Error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None


def _use(data: Path | None) -> None:
    """Read data sets from a folder, in this process and in all that it starts."""
    from cprop_lab.workloads.data import ENVIRONMENT

    if data is not None:
        os.environ[ENVIRONMENT] = str(data.absolute())


def _experiment(name: str) -> Any:
    """An experiment by its name."""
    from cprop_lab.experiments import EXPERIMENTS

    if name not in EXPERIMENTS:
        raise ValueError(f"no experiment is called {name!r}: see 'cprop-lab list'")
    return EXPERIMENTS[name]


def _engine(
    storage: str, data: Path | None, address: str | None, executor: Executor, cpus: int, gpus: float, eager: bool
) -> Any:
    from cprop_lab.console import LiveTable
    from cprop_lab.engine import Engine
    from cprop_lab.results import Store

    _use(data)
    compiler = os.environ.get("CXX", "g++")
    if not eager and shutil.which(compiler) is None:
        raise ValueError(
            f"there is no C++ compiler {compiler!r}, with which torch compiles CProp's step: install one (Debian: "
            "apt install g++), name yours in the environment variable CXX, or give --eager"
        )
    return Engine(Store(storage), executor.value, address, cpus, gpus, eager=eager, progress=LiveTable(console))


def _filled(storage: str) -> Any:
    """A store to read from."""
    from cprop_lab.results import Store

    store = Store(storage)
    if not store.finished() and not store.experiments():
        raise ValueError(
            f"{storage} holds no results: give --storage a folder that has some, or run an experiment first"
        )
    return store


def _command() -> str:
    """This command, as it can be given again; folders of this machine are left out of what is kept."""
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
def list_experiments() -> None:
    """Show the experiments: each figure of the paper, by name."""
    from cprop_lab.experiments import EXPERIMENTS, PRESETS

    table = Table(Column("experiment", no_wrap=True), "paper", "what it shows", box=None)
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.figure, experiment.title)
    console.print(table)
    for preset in PRESETS.values():
        console.print(f"--preset {preset.name}: {preset.about}", highlight=False)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="A name of 'cprop-lab list'.")],
    preset: Preset = PresetName.smoke,
    storage: Storage = "results",
    data: Data = None,
    optimizers: Annotated[
        str | None, typer.Option(help="Only these, such as sgd,adam; with and without CProp.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; by default the preset's.")] = None,
    select: Annotated[
        bool | None,
        typer.Option("--select/--paper-rates", help="Select learning rates as the paper did, or take the paper's."),
    ] = None,
    address: Address = None,
    executor: ExecutorOption = Executor.ray,
    cpus: Cpus = 1,
    gpus: Gpus = 0.0,
    eager: Eager = False,
) -> None:
    """Run an experiment, or go on with it, and draw its figure. Runs that are finished are not run again."""
    from cprop_lab.experiments import PRESETS

    with plain_errors():
        chosen = _experiment(experiment)
        if optimizers is not None:
            chosen = chosen.only(optimizers.split(","))
        length = PRESETS[preset.value]
        if seeds is not None:
            length = replace(length, seeds=seeds)
        engine = _engine(storage, data, address, executor, cpus, gpus, eager)
        name = f"{experiment}-{preset.value}"

        def keep(about: dict[str, Any]) -> None:
            engine.store.write_experiment(name, {**about, "command": _command()})

        def begun(about: dict[str, Any], specifications: list[Any]) -> None:
            # So that 'plot' and 'report' can show what there is of a long experiment.
            keep({**about, "runs": list(engine.identified(specifications)), "timings": []})

        keep(chosen.run(length, engine.run, select, begun))
        _show(engine.store, name)
    console.print(f"All experiments on one page: cprop-lab report --storage {storage}", highlight=False, soft_wrap=True)


def _show(store: Any, name: str, folder: Path | None = None) -> None:
    """Draw an experiment's figures, and print its table: times to target, or scores."""
    from cprop_lab import figures, scoreboard
    from cprop_lab.console import fitting
    from cprop_lab.report import draw, scores
    from cprop_lab.targets import pairs

    about = store.experiments()[name]
    runs = store.runs(about["runs"])
    target = folder or store.local("figures") or Path("figures")
    target.mkdir(parents=True, exist_ok=True)
    timings = store.runs(about.get("timings", ()))
    for suffix, figure in draw(about, runs, timings).items():
        path = target / f"{name}{suffix}.png"
        figures.save(figure, path)
        console.print(f"Drawn: {path}", highlight=False, soft_wrap=True)
    if entries := scores(about, runs, timings):
        for table in fitting(console, *scoreboard.table(entries)):
            console.print(table)
    elif found := pairs(runs):
        _print_targets(found)


def _print_targets(found: Any) -> None:
    """When CProp comes to the loss at which the plain optimizer ends."""
    from cprop_lab.targets import outcome

    table = Table("with CProp", "iterations to the plain one's last loss", "seconds to it", "seeds", box=None)
    for name, pair in found.items():
        table.add_row(name, *(outcome(pair, of) for of in ("iterations", "seconds")), str(len(pair.plain)))
    console.print(table)
    console.print("(as a part of what the plain optimizer takes: 1 is no gain; mean and one standard deviation)")


@app.command()
def plot(
    experiment: Annotated[
        str | None, typer.Argument(help="A name of 'cprop-lab list'; by default all that ran.")
    ] = None,
    storage: Storage = "results",
    out: Annotated[Path | None, typer.Option(help="Where the pictures go; by default figures/ in the storage.")] = None,
) -> None:
    """Draw the figures of experiments that ran, from what is stored alone."""
    with plain_errors():
        store = _filled(storage)
        names = [name for name, about in store.experiments().items() if experiment in (None, about["experiment"], name)]
        if not names:
            raise ValueError(f"{storage} holds no experiment {experiment or ''}: run one first, see 'cprop-lab list'")
        for name in names:
            _show(store, name, out)


@app.command()
def report(
    storage: Storage = "results",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
) -> None:
    """Write one self-contained page on all experiments that ran: figures, times to target, how each run was made."""
    from cprop_lab import report as page

    with plain_errors():
        page.write(_filled(storage), out)
    console.print(f"Written: {out}", highlight=False, soft_wrap=True)


@app.command()
def compare(
    task: Annotated[
        str, typer.Argument(help="module:Task in this folder (see docs/own-task.md), or a workload's name.")
    ],
    optimizers: Annotated[str, typer.Option(help="Which, separated by commas.")] = "sgd,adam",
    iterations: Annotated[int, typer.Option(min=10, help="Of the runs that are compared.")] = 5_000,
    selection_iterations: Annotated[
        int, typer.Option(min=1, help="Of the runs that select a learning rate; at most --iterations.")
    ] = 5_000,
    seeds: Annotated[int, typer.Option(min=1, help="How many; with one, nothing can be said about chance.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    examples: Annotated[
        int, typer.Option(min=1, help="Of the training and test data an evaluation looks at.")
    ] = 10_000,
    storage: Storage = "results",
    data: Data = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("comparison.png"),
    address: Address = None,
    executor: ExecutorOption = Executor.ray,
    cpus: Cpus = 1,
    gpus: Gpus = 0.0,
    eager: Eager = False,
) -> None:
    """Does CProp help my training? Select learning rates, compare with and without CProp, and say so in plain words."""
    from cprop_lab import compare as comparing
    from cprop_lab import figures
    from cprop_lab.results import METRICS, measured
    from cprop_lab.specification import Specification

    with plain_errors():
        specification = Specification(
            task,
            "sgd",
            lr=1.0,
            batch_size=batch_size,
            iterations=iterations,
            evaluate_every=max(1, iterations // 50),
            examples=examples,
        )
        engine = _engine(storage, data, address, executor, cpus, gpus, eager)
        found = comparing.compare(specification, optimizers.split(","), engine.run, seeds, selection_iterations)
        told = any(measured(found.runs, metric) for metric in METRICS)
        panels = ("train_loss", "accuracy" if told else "test_loss", "mean_scale")
        figures.save(figures.curves(found.runs, panels, title=task), out)
        console.print()
        for base, selection in found.selections.items():
            tried = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in selection.losses.items())
            console.print(f"Learning rate of {base}: {selection.lr:g} (training loss at {tried})", highlight=False)
        for name, pair in found.pairs.items():
            console.print(f"\n{comparing.verdict(name, pair)}", highlight=False)
        console.print(f"\nDrawn: {out}", highlight=False, soft_wrap=True)


@app.command()
def cost(
    experiment: Annotated[
        str | None, typer.Argument(help="A name of 'cprop-lab list'; by default all of the paper's.")
    ] = None,
    preset: Preset = PresetName.paper,
    data: Data = None,
    tflops: Annotated[
        float, typer.Option(help="That a device sustains on such networks, in 10^12 operations a second.")
    ] = 5.0,
    overhead: Annotated[
        float, typer.Option(help="Milliseconds an iteration that no device saves: launches, data.")
    ] = 3.0,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the counts.")] = None,
) -> None:
    """Estimate what experiments cost, from operations counted on real steps."""
    from rich.progress import track

    from cprop_lab import cost as costs
    from cprop_lab.experiments import EXPERIMENTS, PRESETS
    from cprop_lab.results import identify

    with plain_errors():
        _use(data)
        papers = [one for one in EXPERIMENTS.values() if one.kind != "scoreboard"]
        chosen = [_experiment(experiment)] if experiment else papers
        planned = {one.name: costs.planned(one, PRESETS[preset.value]) for one in chosen}
        counting = track(planned.items(), "counting", console=console, transient=True)
        found = {name: costs.estimate(runs) for name, runs in counting}
        once = {identify(run): run for runs in planned.values() for run in runs}
        found["all, each run once"] = costs.estimate(once.values())
        heads = ["runs", "iterations", "10^15 operations", "hours on one device"]
        table = Table(Column("experiment", no_wrap=True), *heads, box=None)
        for name, one in found.items():
            table.add_row(name, *one.cells(tflops, overhead))
        console.print(table)
        console.print(
            f"An assumption, not a measurement: {tflops:g} 10^12 operations a second and {overhead:g} ms an iteration "
            "besides.",
            highlight=False,
        )
        if out is not None:
            counts = {name: asdict(one) for name, one in found.items()}
            about = {"command": _command(), "tflops": tflops, "overhead_ms": overhead, "experiments": counts}
            out.write_text(json.dumps(about, indent=2) + "\n")


@app.command()
def export(
    to: Annotated[Sink, typer.Option(help="Which tool.")],
    target: Annotated[str, typer.Option(help="A folder, a tracking address or a project, as the tool has it.")],
    storage: Storage = "results",
) -> None:
    """Send the curves of all finished runs to TensorBoard, MLflow or Weights & Biases."""
    from cprop_lab.sinks import export as send

    with plain_errors():
        runs = _filled(storage).runs()
        send(runs, to.value, target)
    console.print(f"{len(runs)} runs sent to {to.value}.")
