#!/usr/bin/env bash
# Set-up (own .venv unless an environment is active) and the whole test suite.
# Further arguments go to pytest:  bash tests/run.sh -k grid    bash tests/run.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/setup_env.sh
setup_env test,dev
exec python -m pytest -p no:cacheprovider --durations=15 "$@"
