"""The figures of the pages, drawn from the library's own functions: ``python docs/figures/draw.py FOLDER``."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "_extensions"))
from looks import BLUE, GREEN, ORANGE, PINK, STYLE

import cprop
from cprop.measures import MEASURES
from cprop.moments import Moments

DOCS = Path(__file__).parents[1]


def scale_at(z: np.ndarray, n: float = 1000.0, **settings: object) -> np.ndarray:
    """The scale of a mean that lies ``z`` standard errors from zero, after ``n`` gradients."""
    m_hat = torch.from_numpy(np.abs(z))
    v_hat = (n - 1) + m_hat**2  # the variance at which the standard error is one
    # The mean absolute value of normal gradients, for the one measure that asks for it.
    mean, deviation = m_hat, math.sqrt(n - 1)
    a_hat = deviation * math.sqrt(2 / math.pi) * torch.exp(-((mean / deviation) ** 2) / 2) + mean * torch.erf(
        mean / (deviation * math.sqrt(2))
    )
    return cprop.conformity_scale(m_hat, v_hat, n, eps=0.0, a_hat=a_hat, **settings).numpy()  # type: ignore[arg-type]


def conformity() -> Figure:
    """The paper's figure 1: three sampling distributions of the mean gradient."""
    figure = Figure(figsize=(8, 2.5))
    x = np.linspace(-6, 9, 600)
    for axes, (name, mean) in zip(
        figure.subplots(1, 3, sharey=True),
        {"total conformity": 4.0, "high conformity": 1.4, "low conformity": 0.2}.items(),
        strict=True,
    ):
        density = np.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi)
        axes.plot(x, density, color="0.2", linewidth=1.4)
        axes.fill_between(x, density, where=x > 0, color=BLUE, alpha=0.55, linewidth=0)
        axes.fill_between(x, density, where=x < 0, color=ORANGE, alpha=0.75, linewidth=0)
        axes.axvline(0, color="0.2", linewidth=1)
        positive = (1 + math.erf(mean / math.sqrt(2))) / 2
        s = scale_at(np.array([mean])).item()
        axes.set_title(f"{name}: s = {s:.2f}")
        place, side = (-5.8, "left") if mean > 2 else (8.8, "right")
        axes.text(place, 0.36, f"P(> 0) = {positive:.3f}", color=BLUE, ha=side, fontsize=8)
        axes.text(place, 0.31, f"P(< 0) = {1 - positive:.3f}", color=ORANGE, ha=side, fontsize=8)
        axes.set_xlabel("mean gradient, in standard errors")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    return figure


def measures() -> Figure:
    """The scale against the mean over its standard error: by measure, and by c."""
    figure = Figure(figsize=(8, 3.3))
    by_measure, by_c = figure.subplots(1, 2, sharey=True)
    z = np.linspace(0, 4, 400)
    for name in MEASURES:
        style = {"normal": "-", "student_t": "--", "logistic": ":"}.get(name, "-.")
        n = 10.0 if name == "student_t" else 1000.0
        label = f"{name}, n = {n:,.0f}" if name not in ("normal", "logistic") else name
        by_measure.plot(z, scale_at(z, n, measure=name), style, label=label)
    by_measure.set_title("measures, c = 1")
    by_measure.set_ylabel("scale")
    for c, colour in zip((1.0, 2.0, 4.0, 8.0), mpl.colormaps["Blues"](np.linspace(1.0, 0.45, 4)), strict=True):
        by_c.plot(z, scale_at(z, c=c), color=colour, label=f"c = {c:.0f}")
    by_c.axhline(1, color="0.5", linewidth=1, linestyle=":", label="c = ∞: the plain optimizer")
    by_c.set_title('measure "normal"')
    for axes in (by_measure, by_c):
        axes.set_xlabel("|mean| / standard error")
        axes.legend(fontsize=8, loc="lower right")
    by_measure.legend(fontsize=8, loc="center right", bbox_to_anchor=(1, 0.42))
    return figure


def horizon() -> Figure:
    """The effective number of gradients, and the scale that noise alone has on average."""
    figure = Figure(figsize=(8, 3.1))
    number, floor = figure.subplots(1, 2)
    t = np.unique(np.round(np.logspace(0, 5, 400)))
    for beta in (0.9, 0.99, 0.999, 0.9999):
        n = (1 - beta**t) / (1 - beta)
        number.loglog(t, n, label=f"β = {beta}")
        # The variance of the running mean is k times a gradient's; CProp takes it to be 1 / (n - 1) of it.
        k = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
        floor.semilogx(t[1:], (2 / math.pi) * np.arctan(np.sqrt((n - 1) * k))[1:], label=f"β = {beta}")
    number.plot(t, t, color="0.6", linewidth=1, linestyle=":", label="all gradients alike")
    number.set_title("gradients that count")
    number.set_ylabel("n")
    number.legend(fontsize=8)
    floor.axhline(2 / math.pi * math.atan(math.sqrt(0.5)), color="0.6", linewidth=1, linestyle=":")
    floor.set_title("mean scale of noise alone")
    floor.set_ylabel("scale")
    floor.set_ylim(0, 0.6)
    for axes in (number, floor):
        axes.set_xlabel("steps")
    return figure


def two_parameters() -> Figure:
    """Gradients of two parameters, their running means, and the scales that follow."""
    generator = torch.Generator().manual_seed(2)  # whose noise is of average luck: a mean scale of 0.39
    steps, turn = 4000, 2500
    gradients = torch.randn(steps, 2, generator=generator)
    gradients[:turn, 0] += 0.15
    gradients[turn:, 0] -= 0.15
    beta, m, v = 0.999, torch.zeros(2), torch.zeros(2)
    seen = []
    for t, g in enumerate(gradients, 1):
        m, v = beta * m + (1 - beta) * g, beta * v + (1 - beta) * g**2
        b = 1 - beta**t
        moments = Moments.of(m / b, v / b, n=b / (1 - beta), eps=1e-8)
        scale = cprop.conformity_scale(m / b, v / b, b / (1 - beta))
        seen.append(torch.stack([moments.m_hat, moments.m_hat.abs() / moments.z, scale]))
    mean, error, scale = torch.stack(seen).numpy().transpose(1, 2, 0)
    figure = Figure(figsize=(8, 3.4))
    grid = figure.subplots(2, 2, sharex=True, height_ratios=(2, 1.2))
    names = ("agree: mean 0.15, then -0.15; deviation 1", "disagree: mean 0, deviation 1")
    x = np.arange(1, steps + 1)
    for i, (name, colour) in enumerate(zip(names, (BLUE, ORANGE), strict=True)):
        top, bottom = grid[0][i], grid[1][i]
        top.plot(x[::5], gradients[::5, i], ".", color="0.75", markersize=1.5, rasterized=True)
        top.fill_between(x, mean[i] - error[i], mean[i] + error[i], color=colour, alpha=0.3, linewidth=0)
        top.plot(x, mean[i], color=colour, label="running mean ± standard error")
        top.axhline(0, color="0.3", linewidth=0.8)
        top.set_ylim(-0.6, 0.6)
        top.set_title(name)
        bottom.plot(x, scale[i], color=colour)
        bottom.set_ylim(0, 1.05)
        bottom.set_xlabel("steps")
    grid[0][0].legend(fontsize=8, loc="lower left")
    grid[0][0].set_ylabel("gradient")
    grid[1][0].set_ylabel("scale")
    return figure


def epsilon() -> Figure:
    """What eps does to the scale of small gradients."""
    figure = Figure(figsize=(8, 2.9))
    axes = figure.subplots()
    n = 1000.0
    deviation = torch.logspace(-10, -2, 300, dtype=torch.float64)
    mean = 3 * deviation / math.sqrt(n - 1)  # three standard errors: no doubt about the sign
    for eps, colour in zip((1e-8, 1e-10, 1e-12, 0.0), (ORANGE, PINK, BLUE, GREEN), strict=True):
        scale = cprop.conformity_scale(mean, deviation**2 + mean**2, n, eps=eps)
        axes.semilogx(deviation, scale, color=colour, label=f"eps = {eps:g}", linestyle="--" if eps == 0 else "-")
    axes.set_xlabel("standard deviation of a parameter's gradient")
    axes.set_ylabel("scale")
    axes.set_title("the same mean, three standard errors from zero")
    axes.legend()
    return figure


def terminal() -> str:
    """What the code of the page on diagnostics prints."""
    page = (DOCS / "diagnostics.md").read_text(encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)[1], {})  # type: ignore[index]
    return printed.getvalue()


def everything(folder: Path) -> None:
    """Draw all of them into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, figure in drawn():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    (folder / "terminal.txt").write_text(terminal(), encoding="utf-8")


def drawn() -> Iterator[tuple[str, Figure]]:
    """Each figure with its name."""
    for draw in (conformity, measures, horizon, two_parameters, epsilon):
        yield draw.__name__.replace("_", "-"), draw()


if __name__ == "__main__":
    everything(Path(sys.argv[1]))
