#!/usr/bin/env bash
# Set up everything that controld's tests and demo need on a CPU machine: system packages, .venv, SGLang, the model.
# Each step leaves a stamp that names the content of its inputs, so a second run only compares stamps.
set -euo pipefail
cd "$(dirname "$0")/.."

STAMPS=.venv/.setup
MODEL_DIR=build/models/smollm2-135m-instruct
ARTEFACT_DIR=build/models/artefacts
STARTED=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - STARTED))" "$*"; }
die() { printf '[setup] error: %s\n' "$1" >&2; [ $# -lt 2 ] || printf '[setup] hint: %s\n' "$2" >&2; exit 1; }

# done_already STEP INPUT...: true when STEP has run on exactly these files' contents.
digest() { cat "$@" | sha256sum | cut -d' ' -f1; }
done_already() { local step=$1; shift; [ -f "$STAMPS/$step" ] && [ "$(cat "$STAMPS/$step")" = "$(digest "$@")" ]; }
stamp() { local step=$1; shift; mkdir -p "$STAMPS"; digest "$@" > "$STAMPS/$step"; }

# Shows pip's progress as one moving line on a terminal and as nothing but the totals elsewhere.
show_pip() {
    local tty=0; [ -t 1 ] && tty=1
    awk -v tty="$tty" -v total="$1" '
        /^(Collecting|Requirement already|Processing)/ { n++; if (tty) printf "\r\033[K    [%3d/%d] %s", n, total, $2 == "already" ? $4 : $2; fflush() }
        !tty && n && n % 40 == 0 && /^(Collecting|Requirement already)/ { printf "    [%3d/%d]\n", n, total; fflush() }
        /^Installing collected/ { if (tty) printf "\r\033[K"; print "    unpacking..."; fflush() }
        END { if (tty) printf "\r\033[K" }'
}

system_packages() {
    local missing=()
    # Not grep -q: it ends at the first hit, and with pipefail ldconfig's broken pipe would count as "not there".
    have_library() { ldconfig -p 2>/dev/null | grep "$1" > /dev/null; }
    have_library libibverbs.so.1 || missing+=(libibverbs1)   # Mooncake's engine links them, TCP or not
    have_library librdmacm.so.1 || missing+=(librdmacm1)
    have_library libnuma.so.1 || missing+=(libnuma1)
    command -v ip > /dev/null && command -v tc > /dev/null || missing+=(iproute2)   # the shaped link
    command -v unshare > /dev/null || missing+=(util-linux)
    command -v gcc > /dev/null || missing+=(gcc)              # the codecs' C kernels, built at first use
    command -v g++ > /dev/null || missing+=(g++)
    if ! "$PYTHON" -c 'import ensurepip' 2> /dev/null; then missing+=("$(basename "$PYTHON")-venv"); fi
    if ! [ -f "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then
        missing+=("$(basename "$PYTHON")-dev")                # torch.compile, which must work beside the stand-ins
    fi
    [ ${#missing[@]} -eq 0 ] && return
    local how="apt-get install -y ${missing[*]}"
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null ||
        die "missing system packages: ${missing[*]}" "run as root: $how"
    say "installing system packages: ${missing[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } > /dev/null ||
        die "could not install: ${missing[*]}" "see the lines above; by hand: $how"
    ldconfig
}

find_python() {
    local candidate
    for candidate in python3.11 python3; do
        if command -v "$candidate" > /dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
            PYTHON=$candidate; return
        fi
    done
    die "Python 3.11 not found (the pinned packages are for it)" "apt-get install python3.11 python3.11-venv (Debian 12 has it as python3)"
}

python_packages() {
    [ -x .venv/bin/python ] || { say "creating .venv with $PYTHON"; "$PYTHON" -m venv .venv; }
    if ! done_already packages requirements/cpu.txt; then
        say "installing Python packages (requirements/cpu.txt, about 1.8 GB)"
        .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -r requirements/cpu.txt |
            show_pip "$(grep -cv '^#' requirements/cpu.txt)"
        stamp packages requirements/cpu.txt
    fi
    if ! done_already sglang requirements/sglang-no-deps.txt; then
        say "installing SGLang and Mooncake without their CUDA dependencies"
        .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-deps -r requirements/sglang-no-deps.txt |
            show_pip "$(grep -cv '^#' requirements/sglang-no-deps.txt)"
        stamp sglang requirements/sglang-no-deps.txt
    fi
    if ! done_already controld pyproject.toml; then
        say "installing controld itself (editable)"
        .venv/bin/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
        stamp controld pyproject.toml
    fi
}

model() {
    done_already model dataplanes/sglang/model.py && [ -f "$MODEL_DIR/model.safetensors" ] && return
    say "converting SmolLM2-135M-Instruct to $MODEL_DIR"
    .venv/bin/python -m dataplanes.sglang.model --output "$MODEL_DIR"
    stamp model dataplanes/sglang/model.py
}

artefact() {
    local made_by=(dataplanes/kvcodec/predictive/{artefact,fit,predictor,reference,tables}.py
        dataplanes/sglang/profiler/{calibrate,head_importance}.py)
    done_already artefact "${made_by[@]}" && compgen -G "$ARTEFACT_DIR/*.safetensors" > /dev/null && return
    say "calibrating codecs on the model, to $ARTEFACT_DIR (a minute or two)"
    rm -rf "$ARTEFACT_DIR"
    .venv/bin/python -m dataplanes.sglang.profiler.calibrate --model "$MODEL_DIR" --out "$ARTEFACT_DIR" > /dev/null
    stamp artefact "${made_by[@]}"
}

find_python
system_packages
python_packages
model
artefact
say "ready"
