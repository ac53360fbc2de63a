"""`python -m expert_cache_shim` is the command `expert-cache` where no script was installed."""

import sys

from .cli import main

sys.exit(main())
