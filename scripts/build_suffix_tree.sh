#!/usr/bin/env bash
# Builds the suffix tree of arctic-inference alone, in seconds: `bash scripts/build_suffix_tree.sh FOLDER [SDIST]`, then
# PYTHONPATH=FOLDER. The whole package needs torch, protobuf and grpc to build; `pip install arctic-inference` does that.
# Needs a C++20 compiler (g++ >= 11). SDIST is arctic_inference-0.3.0.tar.gz; without it, pip downloads it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
[ $# -ge 1 ] || die "name the folder to build into: bash scripts/build_suffix_tree.sh FOLDER [SDIST]"
version=0.3.0 nanobind=2.9.2
mkdir -p "$1"
folder=$(cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
sdist=${2:-$scratch/arctic_inference-$version.tar.gz}
[ $# -lt 2 ] || [ -f "$sdist" ] || die "no file $sdist; leave it out to download it"

setup
pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }
# Without isolation: pip would install torch once more, only to read the metadata.
[ $# -ge 2 ] || pip download "arctic-inference==$version" -d "$scratch" --no-deps --no-binary :all: --no-build-isolation
tar -xzf "$sdist" -C "$scratch"
tools=("nanobind==$nanobind")
command -v cmake >/dev/null || tools+=(cmake)
pip install --target "$scratch/tools" "${tools[@]}"
export PYTHONPATH=$scratch/tools PATH=$PATH:$scratch/tools/bin # where CMakeLists.txt asks for nanobind

source=$scratch/arctic_inference-$version
cmake -S "$source/csrc/suffix_decoding" -B "$scratch/build" -DPython_EXECUTABLE="$(command -v "$python")" >"$scratch/log" ||
  { cat "$scratch/log" >&2 && die "cmake failed"; }
cmake --build "$scratch/build" >"$scratch/log" || { cat "$scratch/log" >&2 && die "the build failed"; }

package=$folder/arctic_inference/suffix_decoding
mkdir -p "$package"
cp "$source/LICENSE" "$source/arctic_inference/__init__.py" "$folder/arctic_inference/"
cp "$source"/arctic_inference/suffix_decoding/*.py "$scratch"/build/_C*.so "$package/"
PYTHONPATH=$folder "$python" -c "from arctic_inference.suffix_decoding import SuffixDecodingCache"
echo "built; use it with PYTHONPATH=$folder"
