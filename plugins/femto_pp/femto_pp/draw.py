"""`femto pp-draw`: a schedule's timeline as text, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from femto_core.errors import UserError
from femto_pp.actions import Action
from femto_pp.placement import Placement
from femto_pp.plugin import PPSection, chunks_of
from femto_pp.simulate import Simulation, play

COLOURS = {"F": "#7fb3d5", "B": "#f0b27a", "W": "#a9dfbf"}


@attrs.frozen(kw_only=True)
class DrawConfig:
    """Draw the timeline of a pipeline schedule: forward and the two halves of backward take one unit of time each."""

    schedule: str = "1f1b"
    """Which schedule."""
    size: int = 4
    """Ranks of the pipeline."""
    micro_batches: int = 8
    """Micro-batches of a step."""
    chunks: int = 0
    """Stages of each rank; 0: the least that the schedule needs."""
    output: Path | None = None
    """A PNG to write too."""


def draw(words: Sequence[str]) -> int:
    """Run the command."""
    import tyro  # takes a while to load

    config = tyro.cli(DrawConfig, args=list(words), prog="femto pp-draw", description=DrawConfig.__doc__)
    if config.size < 1 or config.micro_batches < 1:
        raise UserError(f"--size {config.size} and --micro-batches {config.micro_batches} must be at least 1")
    if config.chunks < 0:
        raise UserError(f"--chunks {config.chunks} must not be negative")
    chunks = chunks_of(PPSection(schedule=config.schedule, chunks=config.chunks))
    placement = Placement(config.size, chunks)
    simulation = play(config.schedule, config.micro_batches, placement)
    print(as_text(simulation))
    in_flight = ", ".join(str(simulation.in_flight(rank)) for rank in range(config.size))
    print(f"\n{config.schedule}: bubble {simulation.bubble:.1%}, forwards in flight {in_flight}")
    if config.output is not None:
        try:
            as_picture(simulation, config.schedule, config.output)
        except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
            raise UserError(f"--output {config.output} cannot be written: {error}") from None
        print(f"wrote {config.output}")
    return 0


def as_text(simulation: Simulation) -> str:
    """Return one line for each rank, one column for each unit of time."""
    width = max(len(label(p.action)) for p in simulation.timeline) + 1
    lines = []
    for rank in range(simulation.size):
        cells = [" " * width] * round(simulation.length)
        for played in simulation.timeline:
            if played.rank == rank:
                start, end = round(played.start), round(played.end)
                cells[start:end] = [label(played.action).ljust(width), *["." * (width - 1) + " "] * (end - start - 1)]
        lines.append(f"rank {rank}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def label(action: Action) -> str:
    """Return an action's printable form."""
    return str(action)


def as_picture(simulation: Simulation, title: str, path: Path) -> None:
    """Draw the timeline as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, simulation.length * 0.35), 1 + 0.5 * simulation.size))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for played in simulation.timeline:
        middle = (played.start + played.end) / 2
        symbol, shade = played.action.symbol, 1 - 0.35 * (played.action.chunk % 3)
        length = played.end - played.start
        axes.barh(played.rank, length, left=played.start, color=COLOURS[symbol], alpha=shade, edgecolor="white")
        axes.text(middle, played.rank, str(played.action.micro_batch), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(simulation.size), [f"rank {rank}" for rank in range(simulation.size)])
    axes.invert_yaxis()
    axes.set_xlabel("time")
    axes.set_title(
        f"{title}: forward (blue), backward (orange), weight gradient (green); bubble {simulation.bubble:.1%}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
