# Sourced by tests/run.sh and examples/quickstart.sh: an environment with everything installed.
#
#   setup_env EXTRAS     e.g. setup_env test,dev
#
# Uses the active virtual or conda environment if there is one, else makes .venv in the
# repository. Installs only when something it depends on has changed since last time.
# PYTHON chooses the interpreter of a new environment.

setup_env() {
    local extras="$1" root python stamp wanted
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    python="${PYTHON:-python3}"
    if ! command -v "$python" > /dev/null; then
        echo "error: no interpreter '$python'; set PYTHON to a Python 3.10 or newer" >&2
        return 1
    fi
    if [ -n "${VIRTUAL_ENV:-}" ] || [ -n "${CONDA_PREFIX:-}" ]; then
        python=python
    elif [ -x "$root/.venv/bin/python" ]; then
        python="$root/.venv/bin/python"
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: $("$python" --version 2>&1) is too old; set PYTHON to a Python 3.10 or newer" >&2
        return 1
    fi
    if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
        [ -x "$root/.venv/bin/python" ] || { echo "making $root/.venv"; "$python" -m venv "$root/.venv"; }
        # shellcheck disable=SC1091
        . "$root/.venv/bin/activate"
    fi
    stamp="$(python -c 'import sys; print(sys.prefix)')/.megatron-bitfit-$extras"
    wanted="$root $(cat "$root/constraints.txt" "$root/setup.py" "$root/pyproject.toml" \
                    "$root/megatron/data/helpers.cpp" | cksum)"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing megatron-bitfit[$extras] (some minutes the first time)"
        # torch alone first: what depends on it would otherwise choose a version of its own
        python -m pip install --quiet -c "$root/constraints.txt" torch
        python -m pip install --quiet -c "$root/constraints.txt" -e "$root[$extras]"
        echo "$wanted" > "$stamp"
    fi
    # several ranks share the cores: one thread each, unless the user knows better
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}
