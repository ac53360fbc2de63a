#!/usr/bin/env bash
# Builds the kernel library for one backend.
set -euo pipefail
export LC_ALL=C

usage() {
  cat <<'TEXT'
usage: hip/build.sh host|hip|cuda [--with clang|hipcc] [OUT] [compiler flags...]

  host   emulated workgroups on the CPU. Compiler: CXX, else g++, else clang++.
  hip    AMD. Compiler: clang-19 without any ROCm package (reproducible), else hipcc.
         --with picks one. CLANG and HIPCC name them; EXPERT_CACHE_ARCHS lists the
         architectures (default: gfx90a gfx942 gfx1201).
  cuda   NVIDIA. Compiler: NVCC, else nvcc. CUDA_ARCHS lists the architectures (default: the
         GPUs of this machine, else sm_80 sm_90, and PTX of the last one for later GPUs).

  OUT defaults to expert_cache_shim/lib/libexpertcache_<backend>.so. With the default,
  `hip` also writes libexpertcache_hip.so.sha256 beside it.
TEXT
}

fail() {
  printf 'hip/build.sh: %s\n' "$*" >&2
  exit 1
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source_name=expert_cache.hip.cpp
common_flags=(-O3 -std=c++17 -DNDEBUG)

# A variable that names no command is an error, not a hint.
require_command_in() {
  local variable
  for variable; do
    [[ -z ${!variable:-} ]] || command -v "${!variable}" >/dev/null ||
      fail "$variable=${!variable}: no such command"
  done
}

# Prints the first of the given commands and paths that can be run.
first_runnable() {
  local candidate
  for candidate; do
    if [[ -n $candidate ]] && command -v "$candidate"; then return 0; fi
  done
  return 1
}

# "a, b;c" -> "a b c"
as_words() {
  tr -s ',; \t\n' ' ' <<<"$1" | sed 's/^ //; s/ $//'
}

# Runs a command that takes `-o FILE` in the source's folder and moves the file into place. So no
# path reaches the object, and a process that has the old library mapped keeps it whole.
make_out() {
  local part
  mkdir -p "$(dirname "$out")"
  part=$(mktemp "$out.XXXXXX")
  # shellcheck disable=SC2064  # the name is wanted as it is now
  trap "rm -f '$part' '$part.o'" EXIT
  (cd "$here" && "$@" "$part")
  chmod 0755 "$part"
  mv -f "$part" "$out"
}

build_host() {
  local compiler
  require_command_in CXX
  compiler=$(first_runnable "${CXX:-}" g++ clang++ clang++-19) ||
    fail "no C++ compiler; Debian's package g++ brings one"
  make_out "$compiler" -O2 -g -std=c++17 -Wall -Wextra -fPIC -shared -fvisibility=hidden \
    "${extra_flags[@]}" -x c++ "$source_name" -o
}

rocm_wheel_hipcc() {
  local python purelib
  python=$(first_runnable python3 python) || return 1
  purelib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
  first_runnable "$purelib"/_rocm_sdk_*/bin/hipcc
}

find_hipcc() {
  first_runnable "${HIPCC:-}" ${HIP_PATH:+"$HIP_PATH/bin/hipcc"} \
    ${ROCM_PATH:+"$ROCM_PATH/bin/hipcc"} /opt/rocm/bin/hipcc hipcc || rocm_wheel_hipcc
}

# The HIP driver runs these two; without them clang fails with a message that names no package.
require_llvm_tool() {
  local clang=$1 tool=$2 package=$3 path
  path=$("$clang" -print-prog-name="$tool")
  [[ -x $path ]] || fail "$clang has no $tool beside it; Debian's package $package brings it"
}

# No ROCm headers, no device libraries, no link to libamdhip64: the process that loads the
# object (PyTorch) brings the runtime, of whatever ROCm release it was built for.
# -fuse-cuid=none drops a random symbol, -Werror=date-time keeps the clock out.
# Code object version 5, whatever the compiler's default: what older ROCm can still load.
build_hip_with_clang() {
  local clang=$1
  require_llvm_tool "$clang" lld lld-19
  require_llvm_tool "$clang" clang-offload-bundler clang-tools-19
  make_out "$clang" -x hip "${common_flags[@]}" -Wall -Wextra -Werror=date-time \
    -fPIC -shared -fvisibility=hidden -fuse-ld=lld -nogpuinc -nogpulib -no-hip-rt \
    -mcode-object-version=5 -fuse-cuid=none -ffile-prefix-map="$here"=hip \
    -DEXPERT_CACHE_HIP_MINIMAL "${hip_arch_flags[@]}" "${extra_flags[@]}" "$source_name" -o
}

# hipcc prefers nvcc where it sees one, hence HIP_PLATFORM. When it links, it adds its own
# libamdhip64 and a path to it; the object is an ordinary one, so the C compiler links it instead.
compile_with_hipcc_and_link() {
  local hipcc=$1 linker=$2 part=$3
  HIP_PLATFORM=amd "$hipcc" -x hip "${common_flags[@]}" -fPIC -fvisibility=hidden \
    "${hip_arch_flags[@]}" "${extra_flags[@]}" -c "$source_name" -o "$part.o"
  "$linker" -shared "$part.o" -o "$part"
  rm "$part.o"
}

build_hip_with_hipcc() {
  local linker
  linker=$(first_runnable cc gcc clang clang-19) ||
    fail "no C compiler to link with; Debian's package gcc brings one"
  make_out compile_with_hipcc_and_link "$1" "$linker"
}

build_hip() {
  local archs arch compiler
  require_command_in CLANG HIPCC
  archs=$(as_words "${EXPERT_CACHE_ARCHS:-gfx90a gfx942 gfx1201}")
  hip_arch_flags=("-DEXPERT_CACHE_ARCHITECTURES=\"$archs\"")
  for arch in $archs; do
    [[ $arch == gfx* ]] || fail "EXPERT_CACHE_ARCHS: '$arch' is not an AMD architecture (gfx...)"
    hip_arch_flags+=("--offload-arch=$arch")
  done

  if [[ $with != hipcc ]] && compiler=$(first_runnable "${CLANG:-}" clang-19); then
    build_hip_with_clang "$compiler"
  elif [[ $with != clang ]] && compiler=$(find_hipcc); then
    build_hip_with_hipcc "$compiler"
  else
    case $with in
      hipcc) fail "no hipcc in HIPCC, HIP_PATH, /opt/rocm, PATH or a ROCm wheel; ROCm's package" \
        "hipcc brings it" ;;
      *) fail "no clang-19; Debian's packages clang-19 lld-19 clang-tools-19 bring what is needed" ;;
    esac
  fi

  if [[ $out == "$default_out" ]]; then
    (cd "$(dirname "$out")" && sha256sum "$(basename "$out")" >"$(basename "$out").sha256")
  fi
}

local_cuda_archs() {
  command -v nvidia-smi >/dev/null || return 1
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    sed -n 's/^ *\([0-9]*\)\.\([0-9]\) *$/sm_\1\2/p' | sort -u
}

# The static CUDA runtime: the library is loaded into a process whose PyTorch brings its own
# libcudart, of another version and out of sight of our symbols (RTLD_LOCAL). Both runtimes
# share the device's primary context, so streams and pointers pass between them.
build_cuda() {
  local nvcc archs arch number names=
  local flags=()
  require_command_in NVCC
  nvcc=$(first_runnable "${NVCC:-}" nvcc ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} \
    /usr/local/cuda/bin/nvcc) ||
    fail "no nvcc in NVCC, PATH, CUDA_HOME or /usr/local/cuda; the CUDA toolkit brings it"
  [[ ${NVCC_CCBIN:-} ]] || command -v g++ >/dev/null ||
    fail "$nvcc needs a host compiler; Debian's package g++ brings one"

  archs=$(as_words "${CUDA_ARCHS:-$(local_cuda_archs || true)}")
  for arch in ${archs:-sm_80 sm_90}; do
    number=${arch#sm_}
    [[ $number =~ ^[0-9]+[a-z]?$ ]] ||
      fail "CUDA_ARCHS: '$arch' is not an NVIDIA architecture (sm_90, say)"
    flags+=("-gencode=arch=compute_$number,code=sm_$number")
    names+="sm_$number "
  done
  flags+=("-gencode=arch=compute_$number,code=compute_$number")
  flags+=("-DEXPERT_CACHE_ARCHITECTURES=\"${names}compute_$number\"")

  make_out "$nvcc" -x cu "${common_flags[@]}" -cudart static -shared \
    -Xcompiler -fPIC,-fvisibility=hidden,-Wall -Xlinker --exclude-libs,ALL \
    "${flags[@]}" "${extra_flags[@]}" "$source_name" -o
}

backend=${1:-}
case $backend in
  host | hip | cuda) shift ;;
  -h | --help) usage; exit 0 ;;
  *) usage >&2; exit 2 ;;
esac

with=
if [[ ${1:-} == --with ]]; then
  with=${2:-}
  [[ $backend == hip && $with =~ ^(clang|hipcc)$ ]] ||
    fail "--with takes clang or hipcc, and only for the hip backend"
  shift 2
fi

default_out=$(dirname "$here")/expert_cache_shim/lib/libexpertcache_$backend.so
out=$default_out
if [[ ${1:-} && $1 != -* ]]; then
  out=$(realpath -m "$1")
  shift
fi
extra_flags=("$@")

"build_$backend"
printf 'built %s\n' "$out"
