"""`python -m oracle_offload` is the console script `oracle-offload`."""

import sys

from .cli import main

sys.exit(main())
