"""These tests want PyTorch's CUDA build over the simulated driver: `make cuda-check` has it."""

import sys

collect_ignore_glob = [] if "before_torch" in sys.modules else ["test_*.py"]
