# shellcheck shell=bash
# Sourced by tests/run.sh, examples/*.sh and .ci/run: an environment with everything installed.
#
#   setup_env EXTRAS     e.g. setup_env test,dev; afterwards "python" is the one to use
#
# An active virtual or conda environment (but for conda's base) is used, and a torch that it
# already holds stays. Without one, .venv is made in the repository, with the exact versions of
# constraints.txt. Nothing is installed again until one of the files it depends on changes.
# PYTHON chooses the interpreter of a new .venv.

_error() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

_version_of() {
    "$1" -c 'import sys; print(*sys.version_info[:3], sep=".")' 2> /dev/null
}

_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null
}

# Interpreter for a new .venv: PYTHON, or the first on PATH that is new enough.
_base_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        _version_of "$PYTHON" > /dev/null || _error "PYTHON=$PYTHON does not run; name a Python 3.10 or newer"
        _new_enough "$PYTHON" || _error "PYTHON=$PYTHON is Python $(_version_of "$PYTHON"); 3.10 or newer is needed"
        echo "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if _new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    _error "no Python 3.10 or newer on PATH (python3 is $(_version_of python3 || echo missing));" \
        "name one, for example PYTHON=/path/to/python3.11"
}

# Make .venv unless a whole one is there (an interrupted one is not), and activate it.
_own_environment() {
    local root="$1" base
    base="$(_base_python)" || exit 1
    if ! "$root/.venv/bin/python" -m pip --version > /dev/null 2>&1 ||
        { [ -n "${PYTHON:-}" ] && [ "$(_version_of "$base")" != "$(_version_of "$root/.venv/bin/python")" ]; }; then
        echo "environment: making $root/.venv with Python $(_version_of "$base")"
        "$base" -m venv --clear "$root/.venv" || _error "$base -m venv could not make $root/.venv"
    fi
    # shellcheck disable=SC1091
    . "$root/.venv/bin/activate"
}

setup_env() {
    local extras="$1" root place="" stamp wanted
    local constraints=()
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        place="$VIRTUAL_ENV"
    elif [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-}" != base ]; then
        place="$CONDA_PREFIX"
    fi
    if [ -n "$place" ]; then
        # first on PATH even where a shell profile put another python before it
        export PATH="$place/bin:$PATH"
        _new_enough python || _error "the active environment $place has Python $(_version_of python || echo missing);" \
            "3.10 or newer is needed: activate another, or none"
    else
        _own_environment "$root"
        place="$root/.venv"
    fi
    stamp="$place/.megatron-bitfit-$extras"
    wanted="$root $(_version_of python) $(cat "$root/constraints.txt" "$root/setup.py" "$root/pyproject.toml" \
        "$root/megatron/data/helpers.cpp" | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        echo "environment: $place is up to date"
    else
        # a torch that somebody chose for this machine's accelerators is not replaced
        if [ "$place" = "$root/.venv" ] || ! python -c 'import importlib.metadata as m; m.version("torch")' 2> /dev/null
        then
            constraints=(-c "$root/constraints.txt")
        fi
        echo "environment: installing megatron-bitfit[$extras] into $place (minutes, the first time)"
        # torch alone first: it is by far the largest part
        python -m pip install ${constraints[@]+"${constraints[@]}"} torch || _error "torch could not be installed, see above"
        python -m pip install ${constraints[@]+"${constraints[@]}"} -e "${root}[$extras]" ||
            _error "megatron-bitfit[$extras] could not be installed, see above"
        (cd "$root" && python -c '
from megatron.data.index_arrays import HAVE_HELPERS
print("environment: the C++ index helper", "is built" if HAVE_HELPERS else
      "could not be built (no compiler?); the slower NumPy path gives the same arrays")') ||
            _error "the installation in $place does not work, see above"
        echo "$wanted" > "$stamp"
    fi
    # several ranks share the cores: one thread each, unless the user knows better
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}
