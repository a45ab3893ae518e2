#!/usr/bin/env bash
# One command per thing to reproduce. Sets up what it needs, skips what is done, ends in a report.
#
#   ./reproduce.sh smoke     train Vanilla, mHC, AttnRes and MSAR at size tiny on the embedded corpus, compare them
#   ./reproduce.sh test      run the test suite
#
#   --no-venv                use the active Python environment as it is instead of .venv
#
# smoke: RUNS=DIR (default runs/smoke) holds the results; STEPS=N (default 200) optimizer steps per strategy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; }

fail() {
    echo "error: $*" >&2
    exit 2
}

say() { echo "+ $*" >&2; }

# Prints the first Python 3.11 or 3.12 on the PATH.
find_python() {
    local candidate
    for candidate in python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or 3.12 on the PATH"
}

# Makes .venv with the package and one set of extras; does nothing if requirements have not changed.
set_up() {
    local extras=$1 base stamp wanted
    if [[ $use_venv == 0 ]]; then
        python=python
        "$python" -c "import lightning, jsonargparse, sentencepiece, zstandard${extras:+, pytest, xdist, hypothesis}" ||
            fail "the active environment lacks a requirement: $python -m pip install -e '.$extras'"
        return
    fi
    stamp=.venv/installed$extras
    if [[ ! -x .venv/bin/python ]]; then
        base=$(find_python)
        say "$base -m venv .venv"
        "$base" -m venv .venv
    fi
    python=.venv/bin/python
    wanted=$(cat requirements.txt pyproject.toml | sha256sum)
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
        say "pip install -e .$extras"
        "$python" -m pip install --quiet --disable-pip-version-check -e ".$extras"
        echo "$wanted" >"$stamp"
    fi
}

run() {
    say "$*"
    "$@"
}

smoke() {
    set_up ""
    local runs=${RUNS:-runs/smoke} data=runs/data/python steps=${STEPS:-200} name
    if [[ ! -f $data/manifest.json ]]; then
        run "$python" -m lit_msar prepare --source python --output "$data"
    fi
    for name in vanilla mhc attnres msar; do
        if [[ -f $runs/$name/result.json ]]; then
            say "$runs/$name is done"
            continue
        fi
        rm -rf "${runs:?}/$name" # an interrupted smoke run is short: start it again
        run "$python" -m lit_msar fit \
            --config configs/base.yaml --config configs/size/tiny.yaml --config configs/data/python.yaml \
            --config "configs/residual/$name.yaml" \
            --trainer.max_steps "$steps" --trainer.val_check_interval "$steps" --data.val_samples 256 \
            --trainer.limit_val_batches 1.0 --trainer.default_root_dir "$runs/$name"
    done
    run "$python" -m lit_msar report --runs "$runs"
    echo
    echo "TensorBoard: $python -m tensorboard.main --logdir $runs"
}

run_tests() {
    set_up "[dev]"
    # a process per core, each of one thread; a file's tests share a process and what its fixtures have prepared
    local workers
    workers=$("$python" -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')
    OMP_NUM_THREADS=1 run "$python" -m pytest --numprocesses "$workers" --dist loadfile "$@"
}

command=${1:-}
[[ $# -gt 0 ]] && shift
use_venv=1
arguments=()
for argument in "$@"; do
    if [[ $argument == --no-venv ]]; then use_venv=0; else arguments+=("$argument"); fi
done

case $command in
smoke) smoke ;;
test) run_tests ${arguments[@]+"${arguments[@]}"} ;;
"" | -h | --help | help) usage ;;
*)
    usage >&2
    fail "no command '$command'"
    ;;
esac
