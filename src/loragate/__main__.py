"""`python -m loragate`."""

import sys

from loragate.cli.main import main

sys.exit(main())
