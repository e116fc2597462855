"""Recipes: everything the paper trains, by name, out of flat files: a backbone, a domain, a method.

A name is `domain/backbone/method`, and stands for an ordered list of stages, each a flat mapping of one command's options.

    command    `loragate recipes`; the commands that stages run lie below this room
    files      where the files are, how they are read and merged
    recipe     stages with values, where each value comes from
    run        a recipe run, once all that it needs is there; its folder: what is finished, what is resumed
    ready      what its stages' commands would refuse, what they lack here, and what they need: memory and time
    rehearsal  the recipe with its counts cut, and the base, rows and questions that stand in for the real ones

The files lie beside this one. Names are imported on first use: the help of a command must not read YAML.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
