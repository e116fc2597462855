"""Recipes: everything the paper trains, by name, as chains of commands in flat YAML files.

    command  `loragate recipes`: list, show, run; the commands that stages run lie below this room
    recipe   backbone, domain and method files, merged into stages with their options
    run      the stages as processes in one folder, resumable
    costs    memory and hours of the stages
    seeds    a run for each training seed, and their mean and deviation
    tiny     a recipe's rehearsal: the same stages on a tiny random model

Names are imported on first use: the help of a command must not read YAML.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
