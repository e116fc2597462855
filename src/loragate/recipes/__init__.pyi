from .costs import (
    costs as costs,
    memory_warnings as memory_warnings,
    summary as summary,
)
from .recipe import (
    Recipe as Recipe,
    Stage as Stage,
    every_name as every_name,
    find_recipes as find_recipes,
    name_parts as name_parts,
    options_of as options_of,
    read_recipe as read_recipe,
)
from .run import (
    RecipeFolder as RecipeFolder,
    run_recipe as run_recipe,
)
from .seeds import (
    compare_seeds as compare_seeds,
    folder_of as folder_of,
    read_seeds as read_seeds,
    with_seed as with_seed,
)
from .tiny import (
    QUESTIONS as QUESTIONS,
    describe_overruled as describe_overruled,
    tiny_recipe as tiny_recipe,
)
