"""``python -m polyhead.cli``."""

import sys

from polyhead.cli import main

sys.exit(main())
