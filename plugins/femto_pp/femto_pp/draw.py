"""`femto pp-draw`: the timeline of a schedule as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import attrs

from femto_core.errors import UserError
from femto_core.sections import at_home, not_negative, positive
from femto_pp.section import PPSection, placement_of
from femto_pp.simulate import Simulation, play

MOST_BLOCKS = 10_000
COLOURS = {"F": "#7fb3d5", "B": "#f0b27a", "W": "#a9dfbf"}


@attrs.frozen(kw_only=True)
class DrawOptions:
    """Draw the timeline of a pipeline schedule. Forward and both halves of backward take one unit of time each."""

    schedule: str = "1f1b"
    """The schedule's name."""
    size: int = attrs.field(default=4, validator=positive)
    """Ranks of the pipeline."""
    micro_batches: int = attrs.field(default=8, validator=positive)
    """Micro-batches of a step."""
    chunks: int = attrs.field(default=0, validator=not_negative)
    """Chunks of each rank; 0: the fewest that the schedule allows."""
    output: str = attrs.field(default="", converter=at_home)
    """An image file to write, such as drawn.png; empty: none."""


def draw(options: DrawOptions) -> int:
    """Print the timeline and write the image. Raises `UserError` for a schedule or file that is impossible."""
    if (blocks := options.size * options.micro_batches * max(1, options.chunks)) > MOST_BLOCKS:
        raise UserError(
            f"--size {options.size} with --micro-batches {options.micro_batches} makes {blocks:,} blocks and more; at "
            f"most {MOST_BLOCKS:,} are drawn"
        )
    placement = placement_of(PPSection(size=options.size, schedule=options.schedule, chunks=options.chunks))
    simulation = play(options.schedule, options.micro_batches, placement)
    print(as_text(simulation))
    in_flight = ", ".join(str(simulation.in_flight(rank)) for rank in range(options.size))
    print(f"\n{options.schedule}: bubble {simulation.bubble:.1%}, forwards in flight {in_flight}")
    if options.output:
        try:
            as_picture(simulation, options.schedule, Path(options.output))
        except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
            raise UserError(f"--output {options.output} cannot be written: {error}") from None
        print(f"wrote {options.output}")
    return 0


def as_text(simulation: Simulation) -> str:
    """Return one line per rank and one column per unit of time."""
    width = max(len(str(p.compute)) for p in simulation.timeline) + 1
    lines = []
    for rank in range(simulation.size):
        cells = [" " * width] * round(simulation.length)
        for played in simulation.timeline:
            if played.rank == rank:
                start, end = round(played.start), round(played.end)
                cells[start:end] = [str(played.compute).ljust(width), *["." * (width - 1) + " "] * (end - start - 1)]
        lines.append(f"rank {rank}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def as_picture(simulation: Simulation, title: str, path: Path) -> None:
    """Write the timeline as an image in the format of the path's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, simulation.length * 0.35), 1 + 0.5 * simulation.size))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for played in simulation.timeline:
        middle = (played.start + played.end) / 2
        symbol, shade = played.compute.symbol, 1 - 0.35 * (played.compute.chunk % 3)
        length = played.end - played.start
        axes.barh(played.rank, length, left=played.start, color=COLOURS[symbol], alpha=shade, edgecolor="white")
        axes.text(middle, played.rank, str(played.compute.micro_batch), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(simulation.size), [f"rank {rank}" for rank in range(simulation.size)])
    axes.invert_yaxis()
    axes.set_xlabel("time")
    axes.set_title(
        f"{title}: forward (blue), backward (orange), weight gradient (green); bubble {simulation.bubble:.1%}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
