from .calibrate import (
    Calibrated as Calibrated,
    calibrate as calibrate,
)
from .select import (
    Selection as Selection,
    select as select,
)
from .settings import (
    DevSettings as DevSettings,
)
from .trials import (
    Trial as Trial,
)
