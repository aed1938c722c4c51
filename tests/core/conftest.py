"""Makes the simulated fleet importable from the tests beside it, and the benchmarks whose simulations they judge."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2]))
