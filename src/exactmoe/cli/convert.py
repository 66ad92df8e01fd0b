"""`exactmoe convert IN OUT --dialect ...`: the same NVFP4 codes, as another tool writes them."""

from typing import Annotated

import typer

from exactmoe.checkpoint import Checkpoint
from exactmoe.checkpoint.rewrite import convert_checkpoint
from exactmoe.cli import options
from exactmoe.cli.output import folder_of, reading
from exactmoe.cli.quantize import Source, Target, Workers, show


def command(
    source: Source,
    out: Target,
    common: options.Common,
    dialect: Annotated[
        str, typer.Option(metavar="NAME", help="modelopt or compressed-tensors: the output's.")
    ],
    lossy: Annotated[
        bool,
        typer.Option("--lossy", help="Also global scales that their reciprocal doesn't give back."),
    ] = False,
    workers: Workers = None,
) -> None:
    """Write NVFP4 weights as another tool does; codes stay as they are."""
    options.require_folder("OUT", out)
    folder = folder_of(source)
    with reading(not common.json, Checkpoint(folder).nbytes) as progress:
        rows, notes = convert_checkpoint(
            folder, out, dialect, lossy=lossy, workers=workers, progress=progress
        )
    show(out, rows, notes, common.json)
