from .candidate import (
    Candidate as Candidate,
)
from .chosen import (
    Chosen as Chosen,
)
from .outcome import (
    Choice as Choice,
    choose as choose,
)
from .settings import (
    ProbeSettings as ProbeSettings,
    SelectionSettings as SelectionSettings,
)
from .transaction import (
    calibrate as calibrate,
)
