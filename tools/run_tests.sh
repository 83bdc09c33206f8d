#!/usr/bin/env bash
# Set up what the tests need, then run them: bash tools/run_tests.sh [pytest args]
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup_env.sh
exec "$PYTHON" -m pytest "$@"
