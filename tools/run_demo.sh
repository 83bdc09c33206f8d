#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up, then the main job: serve the bundled checkpoint, sweep the load, print the
# table: bash tools/run_demo.sh [--json FILE]; --help lists the other options.
set -euo pipefail
caller=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
source tools/setup_env.sh
# A relative --json FILE belongs to the caller's directory.
cd "$caller"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m tools.demo.cli "$@"
