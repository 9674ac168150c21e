#!/bin/sh
# Makes the folder of wheels that benchmarks/gpu_quarter.sh installs on a machine without a network.
#
#   sh benchmarks/gpu_wheels.sh [FOLDER]               FOLDER: gpu-wheels/, which git ignores
#   PYTHON_VERSION=3.12 PLATFORM=x86_64 …              the Python and the processor of the other machine
#
# The other machine has torch and transformers, with all that these two bring. The wheels are the rest of what Onbeat
# imports, by pin and hash, Redis (the server is a file in a wheel), pytest, and TRL with what it needs beyond packages
# that images with PyTorch have (pandas, pyarrow, requests, aiohttp). matplotlib, which such images have as well, and which
# `onbeat demo` draws with, comes along with PICTURES=1: 22 MB more. vLLM has hundreds of MB: its rows run where the other
# machine has it.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-gpu-wheels}
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
version=${PYTHON_VERSION:-3.12}
platform=${PLATFORM:-x86_64}
# Kilobytes. The clone travels with the wheels, 64 MiB together.
most_kb=${MOST_KB:-40000}

# What torch and transformers bring, and in versions that they check.
brought="filelock fsspec hf-xet huggingface-hub jinja2 markupsafe mpmath networkx numpy packaging pyyaml regex safetensors \
setuptools sympy tokenizers tqdm transformers typing-extensions"
pictures="contourpy cycler fonttools kiwisolver matplotlib pillow pyparsing python-dateutil"
[ -z "${PICTURES:-}" ] || pictures=""
elsewhere="async-timeout colorama tzdata"
for_tests="hypothesis iniconfig pluggy pytest pytest-timeout sortedcontainers"
for_trl="datasets dill multiprocess trl xxhash"

list=$(mktemp)
trap 'rm -f "$list"' EXIT
# A requirement is a line that begins with its name, and the lines of its hashes.
awk -v names=" $brought $pictures $elsewhere " '
  /^[a-z]/ { name = $1; sub(/==.*/, "", name); taken = index(names, " " name " ") == 0 }
  taken' requirements/core.txt > "$list"
awk -v names=" accelerate peft " '
  /^[a-z]/ { name = $1; sub(/==.*/, "", name); taken = index(names, " " name " ") > 0 }
  taken' requirements/lora.txt >> "$list"
awk -v names=" $for_tests " '
  /^[a-z]/ { name = $1; sub(/==.*/, "", name); taken = index(names, " " name " ") > 0 }
  taken' requirements/dev.txt >> "$list"

# pip takes a platform's tag to the letter: each one under which wheels of these packages are published.
set -- --no-deps --only-binary=:all: --implementation cp --python-version "$version" --dest "$folder" -qq
for tag in manylinux1 manylinux2010 manylinux2014 manylinux_2_5 manylinux_2_12 manylinux_2_17 manylinux_2_24 \
  manylinux_2_26 manylinux_2_27 manylinux_2_28 manylinux_2_31 manylinux_2_34; do
  set -- "$@" --platform "${tag}_$platform"
done

rm -rf "$folder"
mkdir -p "$folder"
"$python" -m pip download "$@" --require-hashes -r "$list"
pins=""
for name in $for_trl; do
  pins="$pins $(grep "^$name==" constraints.txt)"
done
# shellcheck disable=SC2086
"$python" -m pip download "$@" $pins

size=$(du -sk "$folder" | cut -f 1)
echo "$folder: $(ls "$folder" | wc -l) wheels for Python $version, $size KB"
if [ "$size" -gt "$most_kb" ]; then
  echo "$folder has $size KB, more than MOST_KB=$most_kb: leave packages out that the other machine has" >&2
  exit 1
fi
