"""`rollmill containers`: the containers and images that runs have made, and their removal."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmill.cli.printing import print_json, print_line, print_table

HELP = "List and remove containers and images of runs."

_Engine = Annotated[str, typer.Option("--engine", metavar="ENGINE", help="As environment.engine in a run file.")]


def show(
    engine: _Engine = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the containers that runs have started, and the images that they have made."""
    from rollmill.rollout.containers.engine import ContainerEngine

    found = ContainerEngine(engine)
    containers, images = found.containers(), found.images()
    if as_json:
        listed = [{"id": each.id, "command": each.command, "abandoned": each.abandoned} for each in containers]
        print_json({"containers": listed, "images": images})
        return
    rows = [[each.id[:12], each.state, "no" if each.abandoned else "yes", each.command] for each in containers]
    print_table("containers of runs", ("container", "state", "its run goes on", "command"), rows)
    for name in images:
        print_line(f"image {name}")


def remove(
    engine: _Engine = "auto",
    every: Annotated[
        bool, typer.Option("--all", help="Also containers of runs that go on, and of other hosts.")
    ] = False,
    images: Annotated[bool, typer.Option("--images", help="Also the images that runs have built or prepared.")] = False,
) -> None:
    """Remove the containers of runs that have ended without removing them, as after kill -9."""
    from rollmill.rollout.containers.engine import ContainerEngine

    found = ContainerEngine(engine)
    left = [each for each in found.containers() if every or each.abandoned]
    for each in left:
        found.remove(each.id)
    print_line(f"removed {len(left)} containers")
    if images:
        made = found.images()
        found.remove_images(made)
        print_line(f"removed {len(made)} images")


COMMANDS = {"list": show, "remove": remove}
"""Name of a command -> function."""
