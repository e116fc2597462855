from .answers import (
    Grade as Grade,
)
from .grading import (
    GradingPool as GradingPool,
    MATH_GRADERS as MATH_GRADERS,
    grade_math as grade_math,
)
from .sandbox import (
    ProgramResult as ProgramResult,
    run_program as run_program,
)
from .statistics import (
    Difference as Difference,
    Estimate as Estimate,
    average_at_k as average_at_k,
    compare as compare,
    holm as holm,
)
