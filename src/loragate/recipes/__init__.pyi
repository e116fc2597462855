from .files import (
    every_name as every_name,
    find_recipes as find_recipes,
    read_recipe as read_recipe,
)
from .ready import (
    ANSWER as ANSWER,
    answer as answer,
    needs as needs,
    settled as settled,
)
from .rehearsal import (
    rehearsal_of as rehearsal_of,
    rehearse as rehearse,
)
from .recipe import (
    Recipe as Recipe,
    Stage as Stage,
    options_of as options_of,
)
from .run import (
    Run as Run,
    config_text as config_text,
    run_recipe as run_recipe,
    steps as steps,
)
