"""Recipes: everything the paper trains, by name, composed of small files so that nothing is written twice.

A name is `domain/backbone/method`, or `domain/backbone/method/variant`, and stands for an ordered list of stages, each a
flat mapping of one command's options.

    library   where the files are, and how they are read
    compose   a name, or a file of the user's, to a recipe
    recipe    stages with values, where each value comes from, references between stages
    show      a recipe as YAML and as command lines
    machine   what its stages need there: memory, time, answers
    folder    the run folder: what is finished, what is resumed, what would not fit
    rehearsal the recipe with its counts cut, on stand-ins
    standins  the base, rows and questions of a rehearsal

The files lie beside this one: `common.yaml`, `domain/`, `backbone/`, `method/`, `variant/`, `templates/`,
`questions/`. This room knows no command: what the options of a stage may be arrives as a callable.
"""

from loragate.recipes.compose import compose, every_name, read_recipe
from loragate.recipes.library import Library
from loragate.recipes.recipe import Recipe, Stage

__all__ = ["Library", "Recipe", "Stage", "compose", "every_name", "read_recipe"]
