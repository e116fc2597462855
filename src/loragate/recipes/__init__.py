"""Recipes: everything the paper trains, by name, out of flat files: a backbone, a domain, a method.

A name is `domain/backbone/method`, or that with `/seed-S`, and stands for an ordered list of stages, each a flat mapping of
one command's options.

    files      where the files are, how they are read and merged
    recipe     stages with values, where each value comes from
    run        a recipe run, once all that it needs is there
    folder     the folder of a run: what is finished, what is resumed
    ready      what its stages lack here, asked before the first one
    machine    what its stages need there: memory, time, disk
    rehearsal  the recipe with its counts cut, on stand-ins
    standins   the base, rows and questions of a rehearsal

The files lie beside this one. What only the command line knows, a command's options, comes as a callable:
`loragate.cli.recipes.checked`.
"""

from loragate.recipes.files import Library, every_name, find_recipes, read_recipe
from loragate.recipes.recipe import Recipe, Stage
from loragate.recipes.run import Run, run_recipe

__all__ = ["Library", "Recipe", "Run", "Stage", "every_name", "find_recipes", "read_recipe", "run_recipe"]
