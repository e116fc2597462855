from .costs import (
    costs as costs,
    summary as summary,
)
from .recipe import (
    Recipe as Recipe,
    Stage as Stage,
    every_name as every_name,
    find_recipes as find_recipes,
    options_of as options_of,
    read_recipe as read_recipe,
)
from .run import (
    run_recipe as run_recipe,
)
from .tiny import (
    QUESTIONS as QUESTIONS,
    tiny_recipe as tiny_recipe,
)
