#!/bin/sh
# Builds the source distribution, and the wheel from it: sh deploy/build-wheel.sh [FOLDER], dist/ if none is named.
#
# PYTHON is an interpreter with pip and setuptools; nothing is fetched. The wheel is built from the archive in a folder
# of pip's own, so that no file of an earlier build comes in, and what the archive lacks is missed here.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
folder=${1:-dist}
mkdir -p "$folder"
rm -f "$folder"/onbeat-*.tar.gz "$folder"/onbeat-*.whl
"$python" -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' "$folder" > /dev/null
"$python" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$folder" "$folder"/onbeat-*.tar.gz
ls -l "$folder"
