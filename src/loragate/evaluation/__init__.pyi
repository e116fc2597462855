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
    compare_suites as compare_suites,
    dft_rounded_mean as dft_rounded_mean,
    holm as holm,
    majority_at_k as majority_at_k,
    pass_at_k as pass_at_k,
    suite_average as suite_average,
)
