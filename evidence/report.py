"""Writes measured results into the documentation: ``python -m evidence.report``.

A page has its tables between the markers ``<!-- measured: NAME -->`` and ``<!-- end -->``. They are generated here,
only from ``benchmarks/results``, ``evidence/results`` and the runs in ``evidence/experiments``. A test fails if a table
differs, or if a sentence has a number that is not in the evidence.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from typing import Any

from cprop_lab.output.tables import Table
from cprop_lab.run.cost import Cost
from cprop_lab.run.recipes import RECIPES
from evidence import EVIDENCE, IMAGES, ROOT, cost_model, foretell, gains, pages, summary

NOTHING_MEASURED = ("when-to-use.md", "scoreboard-rules.md", "notes/index.md")
"""Pages of results without a table of their own."""

PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("compatibility", "settings", "step", "scale", "lab", "cluster", "diagnostics")
    ),
    *(
        page
        for page in sorted((ROOT / "docs" / "results").rglob("*.md"))
        if page.relative_to(ROOT / "docs" / "results").as_posix() not in NOTHING_MEASURED
    ),
)
SHAPES = ("fully-connected", "resnet-like", "25M", "gpt2-small")


def results(name: str) -> Any:
    """A committed measurement."""
    (path,) = (found for folder in (ROOT / "benchmarks", EVIDENCE) for found in folder.glob(f"results/{name}.json"))
    return json.loads(path.read_text())


def experiment(name: str) -> pages.Kept:
    """A committed experiment."""
    return pages.kept(EVIDENCE)[name]


def ratios() -> dict[str, dict[str, float]]:
    """Time relative to torch's fused Adam, by optimizer and list of parameters."""
    found: dict[str, dict[str, float]] = {}
    for row in results("step")["rows"]:
        found.setdefault(row["name"], {})[row["shape"]] = row["ratio"]
    return found


def step() -> str:
    """The time per step of every optimizer on every list."""
    headings = ["time relative to torch's fused Adam", *SHAPES]
    return Table(
        headings,
        [[name, *(f"{row[shape]:.2f}" if shape in row else "" for shape in SHAPES)] for name, row in ratios().items()],
    ).markdown()


def memory() -> str:
    """Bytes of state and of temporaries."""
    rows = [row for row in results("step")["rows"] if row["shape"] == "25M"]
    return Table(
        ["optimizer", "state, bytes per parameter", "temporary, bytes per parameter"],
        [
            [row["name"], f"{row['state_bytes_per_parameter']:.1f}", f"{row['temporary_bytes_per_parameter']:.1f}"]
            for row in rows
            if "bare" not in row["name"]
        ],
    ).markdown()


def limits() -> str:
    """CPropAdam's kernel without each of its parts."""
    measured = results("limits")
    adam = measured["kernel_ms"]["torch Adam, fused"]
    rows = [
        [
            {"torch Adam, fused": name, "nothing": "CPropAdam's kernel"}.get(
                name, f"CPropAdam's kernel without {name}"
            ),
            f"{ms:.1f}",
            f"{ms / adam:.2f}",
        ]
        for name, ms in measured["kernel_ms"].items()
    ]
    python = measured["python_us_per_parameter"]
    lines = [f"{name}: {python[name]:.0f} µs" for name in python]
    return (
        Table(["25 M parameters", "ms", "relative to fused Adam"], rows).markdown()
        + f"\n\nBesides the arithmetic, a step spends per parameter tensor: {'; '.join(lines)}."
    )


def epsilon() -> str:
    """Training loss by CProp's epsilon."""
    by_case: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    for run in results("epsilon")["runs"]:
        case = (run["workload"], run["base"], run["smaller"], run["iterations"])
        by_case.setdefault(case, {}).setdefault(run["eps"], []).append(run["train_loss"])  # in the order of seeds
    rows = [
        [
            f"{workload}, CProp({RECIPES[base].title})" + ", gradients times 2⁻²⁷" * smaller,
            f"{iterations:,}",
            str(len(of[0.0])),
            *(
                f"{statistics.mean(x):.4f}" + (f" ± {statistics.stdev(x):.4f}" if len(x) > 1 else "")
                for x in (of[1e-8], of[0.0])
            ),
            f"{statistics.mean(ours - papers for papers, ours in zip(of[1e-8], of[0.0], strict=True)):+.4f}",
        ]
        for (workload, base, smaller, iterations), of in by_case.items()
    ]
    headings = ["training loss", "steps", "seeds", "eps = 1e-8", "eps = 0", "difference"]
    how = "Made by `python -m evidence.epsilon`: mean and standard deviation over seeds."
    return f"{Table(headings, rows).markdown()}\n\n{how}"


def preemption() -> str:
    """The results of the preemption test."""
    run = results("preemption")
    damaged = sum("damaged" in event for event in run["events"])
    worlds = "-".join(str(event["world"]) for event in run["events"])
    return (
        f"{run['kills']} kills in {run['steps']:,} steps, on {worlds} ranks in turn; {damaged} checkpoints damaged on "
        f"purpose, all of them skipped. Largest difference in loss from the undisturbed run, at any step: "
        f"{run['difference']:.1e}."
    )


def claims() -> str:
    """The README's sentence on the time per step."""
    names = (
        "bare loop, the bytes of CPropAdam",
        "CPropAdam, fused",
        "CPropAdam, bfloat16 state, fused",
        "CProp(Adam), fused",
        "authors' formulation around fused Adam",
    )
    limit, native, lean, wrapper, authors = (ratios()[name]["25M"] for name in names)
    return (
        f"Relative to torch's fused Adam, a step of `CPropAdam` takes {native:.1f} times as long ({lean:.1f} with "
        f"bfloat16 state), the wrapper around fused Adam {wrapper:.1f} times, and the authors' formulation "
        f"{authors:.0f} times. A compiled loop that only moves `CPropAdam`'s bytes takes {limit:.1f} times as long."
    )


def cost_by_bytes() -> str:
    """The cost model compared to the measurement."""
    at_25, at_124 = (
        cost_model.check({name: row[shape] for name, row in ratios().items() if shape in row})
        for shape in ("25M", "gpt2-small")
    )
    return Table(
        ["relative to torch's fused Adam", "by bytes", "measured, 25 M", "measured, 124 M"],
        [
            [name, f"{predicted:.2f}", f"{measured:.2f}", f"{larger:.2f}"]
            for (name, predicted, measured), (_, _, larger) in zip(at_25, at_124, strict=True)
        ],
    ).markdown()


def cost_at_scale() -> str:
    """The cost model's prediction."""
    rows = [
        [
            f"{setting.parameters / 1e9:,.0f} B" if setting.parameters < 1e12 else "1 T",
            f"{setting.ranks:,}",
            cost.name,
            f"{setting.gibibytes(cost):.2f}",
            f"{setting.gigabytes_moved(cost):.2f}",
            f"{1e3 * setting.seconds(cost):.2f}",
        ]
        for setting in cost_model.SETTINGS
        for cost in cost_model.COSTS
    ]
    headings = [
        "parameters",
        "ranks",
        "optimizer",
        "state per rank, GiB",
        "bytes moved per rank, GB",
        "time per step, ms",
    ]
    return Table(headings, rows).markdown()


def engine() -> str:
    """The overhead of Ray."""
    run = results("engine")
    return (
        f"A sweep of {run['runs']} runs of {run['seconds_a_run']:.1f} seconds each on {run['processes']} cores took "
        f"{run['ray']:.0f} seconds, Ray's start and end included, and the same runs in {run['processes']} bare "
        f"processes {run['bare']:.0f}: {run['ratio']:.2f} times as long (`python -m benchmarks.engine`)."
    )


def driver() -> str:
    """What the driver of a sweep costs."""
    rows = [
        [
            f"{row['runs']:,}",
            f"{row['ms_per_run']:.1f}",
            f"{row['ms_per_run_by_stretch'][1]:.1f}",
            f"{row['ms_per_run_by_stretch'][-1]:.1f}",
            f"{row['peak_mib_by_stretch'][-1]:.0f}",
        ]
        for row in results("driver")
    ]
    headings = ["runs", "driver's CPU time, ms per run", "second tenth", "last tenth", "peak memory, MiB"]
    how = "Made by `python -m benchmarks.driver`, on a busy machine: sweeps on Ray whose runs train for one step."
    return f"{Table(headings, rows).markdown()}\n\n{how}"


def store() -> str:
    """CPU time and memory of commands on large stores."""
    run = results("store")
    rows = [
        [
            row["command"] + ", packed" * row["packed"],
            f"{row['runs']:,}",
            f"{row['cpu_seconds']:.1f}",
            f"{1e3 * row['cpu_seconds'] / row['runs']:.2f}",
            f"{row['peak_mib']:.0f}",
        ]
        for row in sorted(run["rows"], key=lambda row: (row["packed"], row["command"], row["runs"]))
    ]
    headings = ["command", "runs", "CPU seconds", "ms per run", "peak memory, MiB"]
    how = f"Made by `python -m benchmarks.store`, on a busy machine; runs have {run['evaluations']} evaluations each."
    return f"{Table(headings, rows).markdown()}\n\n{how}"


def programme() -> str:
    """The cost of the paper's experiments."""
    run = results("programme")
    rows = [
        [name, *Cost(**counted).cells(run["tflops"], run["overhead_ms"])]
        for name, counted in run["experiments"].items()
    ]
    costs = Table(["experiment", "runs", "iterations", "10¹⁵ operations", "GPU-hours, assumed"], rows).markdown()
    return f"{costs}\n\nMade by `{run['command']}`; a search for learning rates is taken to try five of them."


def monitor() -> str:
    """The cost of the monitor."""
    run = results("monitor")
    rows = [
        [
            name,
            f"{row['parameters']:,}",
            f"{row['step_ms']:.1f}",
            f"{row['sample_ms']:.1f}",
            f"{100 * row['share']:.2f} %",
        ]
        for name, row in run["networks"].items()
    ]
    headings = [
        "network",
        "parameters",
        "training step, ms",
        "a sample, ms",
        f"a sample every {run['every']} steps adds",
    ]
    how = f"Made by `python -m benchmarks.monitor`: batches of 32, fused CPropAdam, {run['threads']} threads."
    return f"{Table(headings, rows).markdown()}\n\n{how}"


def cell_states() -> str:
    """The LSTM's cell states over time."""
    found = results("cell_states")
    (steps,) = {tuple(row["step"] for row in run["seen"]) for run in found["runs"]}
    early = steps.index(20)
    rows = []
    for run in found["runs"]:
        first, last = run["seen"][early], run["seen"][-1]
        states = (f"{max(row['cells']):.0f}" for row in (first, last))
        scale = "" if last["scale"] is None else f"{last['scale']:.2f}"
        weakest = f"{min(last['gradients']):.0e}"
        rows.append([run["name"], str(run["seed"]), *states, weakest, scale, f"{last['train_loss']:.2f}"])
    headings = [
        "",
        "seed",
        *(f"mean cell state, step {steps[i]}" for i in (early, -1)),
        *(f"{what}, step {steps[-1]}" for what in ("weakest layer's gradient", "mean scale", "training loss")),
    ]
    how = "`python -m evidence.cell_states`; cell states where they are largest; gradients' root mean square"
    made = f"learning rate {found['lr']:g} and {found['precision']} but where another is named; "
    made += f"commit {', '.join(found['commits'])}"
    return f"{Table(headings, rows).markdown()}\n\n*{how}; {made}*"


def lstm() -> str:
    """The laboratory's LSTM compared to torch's."""
    measured = results("lstm")
    float32, bfloat16 = (measured["ms"][precision] for precision in ("float32", "bfloat16"))
    return (
        f"The three LSTM layers of AWD-LSTM take {bfloat16['laboratory']:.0f} ms forward and backward under bfloat16 "
        f"autocast, torch's {bfloat16['torch']:.0f}; in float32 {float32['laboratory']:.0f} and {float32['torch']:.0f} "
        f"({measured['time']} x {measured['batch']} words, threads: {measured['threads']}, torch {measured['torch']})."
    )


def versions() -> str:
    """The library's tests with every release of torch that it supports."""
    found = results("versions")

    def counts(kind: dict[str, Any] | None) -> str:
        return "" if kind is None else f"{kind['passed']:,} / {len(kind['failed'])} / {kind['skipped']}"

    rows = [
        [
            row["torch"],
            counts(row["quick"]),
            counts(row.get("slow")),
            "/".join(str(row["check"].get(verdict, 0)) for verdict in ("ok", "failed", "skipped")).replace("/", " / "),
            "no" if row["off"] else "yes",
            f"{row['date']}, `{row['commit']}`",
        ]
        for row in found
    ]
    headings = ["torch", "quick tests", "slow tests", "`cprop.check`", "`fused=True`", "tested"]
    (machine,) = {row["machine"] for row in found}
    (python,) = {row["python"] for row in found}
    return (
        f"{Table(headings, rows).markdown()}\n\n*Passed / failed / skipped. {machine}, without a GPU; Python {python}.*"
    )


def torch_range() -> str:
    """The releases of torch that were tested."""
    found = results("versions")
    return (
        f"Tested on CPU with every minor release of torch from {found[0]['minor']} to {found[-1]['minor']}; "
        f"`fused=True` needs {next(row['minor'] for row in found if not row['off'])} or later."
    )


COMPARED = (
    "fmnist-fc",
    "fmnist-cnn",
    "dropout",
    "cifar100-vgg",
    "cifar100-resnet",
    "ptb-lstm",
    "ptb-lstm-dropout",
    "shape",
)
"""Experiments whose test losses are compared at the same training loss."""

SECTIONS: dict[str, Callable[[], str]] = {
    "claims": claims,
    "step": step,
    "memory": memory,
    "limits": limits,
    "epsilon": epsilon,
    "preemption": preemption,
    "lstm": lstm,
    "cost by bytes": cost_by_bytes,
    "cost at scale": cost_at_scale,
    "engine": engine,
    "driver": driver,
    "store": store,
    "programme": programme,
    "monitor": monitor,
    "cell states": cell_states,
    "versions": versions,
    "torch range": torch_range,
    "equally far": lambda: pages.equally_far({name: experiment(name) for name in COMPARED}),
    "gains": gains.sentence,
    "gains by task": gains.table,
    "scoreboard summary": summary.table,
    "scoreboard verdict": summary.verdict,
    "finalists summary": summary.finalists,
    "foretell": foretell.report,
}


def filled(page: str) -> str:
    """A page with all its measured sections regenerated."""

    def section(match: re.Match[str]) -> str:
        kind, _, name = match[1].rpartition(" ")
        of_experiment = {"evidence": pages.section, "details": pages.details}
        made = of_experiment[kind](experiment(name)) if kind in of_experiment else SECTIONS[match[1]]()
        return f"<!-- measured: {match[1]} -->\n{made}\n<!-- end -->"

    return re.sub(r"<!-- measured: ([\w -]+) -->\n.*?<!-- end -->", section, page, flags=re.DOTALL)


def main() -> None:
    """Update the pages."""
    for path in PAGES:
        path.write_text(filled(path.read_text()))
        print(f"{path.relative_to(ROOT)} is up to date")
    pages.draw_all(pages.kept(EVIDENCE).values(), IMAGES)
    gains.draw()
    summary.draw()
    print(f"the figures in {IMAGES.relative_to(ROOT)} are up to date")


if __name__ == "__main__":
    main()
