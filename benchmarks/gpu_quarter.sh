#!/usr/bin/env bash
# A quarter of an hour on a GPU that is lent: numbers that are open, in the order in which they are worth it.
#
#   sh benchmarks/gpu_wheels.sh                          before, on a machine with a network: gpu-wheels/
#   bash benchmarks/gpu_quarter.sh [FOLDER] [FLAGS]      there, in the clone; FOLDER: $OUT, or runs/gpu-quarter
#   bash benchmarks/gpu_quarter.sh FOLDER --device cpu   a trial on a CPU, in small sizes
#   bash benchmarks/gpu_quarter.sh FOLDER --list         the rows with their limits
#   bash benchmarks/gpu_quarter.sh FOLDER --only ROW …   some of them; --total-s 400 for less time
#
# It takes the python3 of PATH, or $PYTHON, with the torch and transformers that it has; the rest comes out of
# gpu-wheels/ ($WHEELS) into a folder of its own. Where $OUT is set, results come back as two files:
# $OUT/summary.jsonl and $OUT/rows.tar.gz, which is new after each row.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
wheels=${WHEELS:-gpu-wheels}
folder=${OUT:-runs/gpu-quarter}
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  folder=$1
  shift
fi
mkdir -p "$folder" || exit 1

site=$(mktemp -d)
# Scorers in cages have users of their own, who read the packages too.
chmod 755 "$site"
trap 'rm -rf "$site"' EXIT
install=("$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check)
if compgen -G "$wheels/*.whl" > /dev/null; then
  if ! "${install[@]}" --target "$site" "$wheels"/*.whl; then
    echo "the wheels of $wheels don't go in together: one by one, and what doesn't fit is left out" >&2
    for wheel in "$wheels"/*.whl; do
      "${install[@]}" --target "$site" --upgrade "$wheel" || echo "left out: $wheel" >&2
    done
  fi
else
  echo "no wheels in $wheels: it goes on with what $python has" >&2
fi
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A name that a stack's processes find beside `onbeat`, which isn't installed here.
export PATH="$(dirname "$(command -v "$python")"):$PATH"

archive=()
rows=$folder
if [ -n "${OUT:-}" ] && [ "$folder" = "$OUT" ]; then
  # Few files come back from there. The rows lie beside the packages, and travel in one.
  rows=$site/rows
  archive=(--archive "$OUT/rows.tar.gz")
  mkdir -p "$rows"
  touch "$OUT/summary.jsonl"
  ln -s "$OUT/summary.jsonl" "$rows/summary.jsonl"
fi
"$python" -m benchmarks._gpu_quarter --folder "$rows" "${archive[@]}" "$@" &
child=$!
# The signal of a time limit goes on to the rows, and their line is written.
trap 'kill -TERM "$child" 2>/dev/null' TERM INT HUP
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done
exit "$code"
