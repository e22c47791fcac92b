"""Makes the tests' own record of tokens importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
