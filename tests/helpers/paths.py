# SPDX-License-Identifier: Apache-2.0
"""Where the repository keeps what tests read."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
