"""`python -m tileloom`: the same as the command `tileloom`."""

import sys

from tileloom.cli.main import main

sys.exit(main())
