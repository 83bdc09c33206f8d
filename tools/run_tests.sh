#!/usr/bin/env bash
# Set up what the tests need, then run them: bash tools/run_tests.sh [pytest args]
#
# Without arguments all of them, two files at a time: an engine under the rehearsal is
# one busy thread, and files share nothing.
# With --gpu-release first, they run on the Python of the release that GPUs get, with
# the CPU build's extensions (see tools/make_gpu_release_site.py); without further
# arguments, those of vLLM's own behaviour, of draft depths (only there does depth 0
# skip the draft's query pass) and of the DeepSeek-V4 preset.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup_env.sh
if [ "${1-}" = --gpu-release ]; then
    shift
    site=$("$PYTHON" tools/make_gpu_release_site.py)
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
    if [ $# = 0 ]; then
        folder=tests/v1/worker/gpu
        set -- -n 2 --dist loadfile "$folder"/test_dspark_correctness_stock.py \
            "$folder"/test_dspark_depth.py "$folder"/test_dspark_dflash.py \
            "$folder"/test_dspark_gemma4.py \
            tests/benchmarks/sweep/test_deepseek_v4_stand_ins.py
    fi
elif [ $# = 0 ]; then
    set -- -n 2 --dist loadfile
fi
exec "$PYTHON" -m pytest "$@"
