# One image for every service of docker-compose.yml but redis: they differ by the module that `python -m` runs.
#
#   docker compose build --build-arg EXTRAS=lora,wandb            extras of pyproject.toml, with commas
#   docker compose build --build-arg PIP_EXTRA_INDEX_URL=URL      where pip finds packages, and which build of torch
#   docker compose build --build-arg DEVICE=cuda                  fails where that torch has no CUDA
#   docker compose --profile gpu build producer_gpu               vLLM's generators (ENGINE=vllm)
#   docker compose build --build-arg TORCH_SHA256=HASH            of torch's wheel
#   docker compose build --build-arg PYTHON_IMAGE=NAME@sha256:…   the base image by its digest
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS installed

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# pycosat, which reasoning-gym needs, comes as C source only.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/onbeat
ENV PATH=/opt/onbeat/bin:$PATH

# vLLM brings gigabytes that a trainer doesn't need, so its generators have an image of their own.
ARG ENGINE=transformers
# Every package by its pin and its hash. What is built from source fetches its build tools without one.
ARG EXTRAS=lora,reasoning-gym
COPY requirements /build/requirements
RUN set -e; [ "$ENGINE" = transformers ] || exit 0; \
    files="-r /build/requirements/core.txt"; \
    for extra in $(echo "$EXTRAS" | tr , ' '); do files="$files -r /build/requirements/$extra.txt"; done; \
    pip install --no-deps --require-hashes $files
# torch differs by build, and so does its hash: give the one of the wheel that you expect. What only its CUDA build brings
# comes without hashes.
ARG TORCH_SHA256
ARG DEVICE=cpu
COPY constraints.txt constraints-vllm.txt /build/
RUN set -e; [ "$ENGINE" = transformers ] || exit 0; \
    torch=$(grep '^torch==' /build/constraints.txt); \
    if [ -n "$TORCH_SHA256" ]; then \
      echo "$torch --hash=sha256:$TORCH_SHA256" > /build/torch.txt; \
      pip install --no-deps --require-hashes -r /build/torch.txt; \
    fi; \
    pip install -c /build/constraints.txt "$torch"; \
    python -c "import sys, torch; sys.exit('$DEVICE' != 'cpu' and not torch.version.cuda and 'this build of torch knows no CUDA: give another PIP_EXTRA_INDEX_URL')"

# On a CPU what `onbeat setup vllm` takes, torch as above; on a GPU vLLM's own, with what a generator imports beside it and
# PyPI's torch, each by its hash (x86-64; deploy/lock.sh makes both lists).
RUN set -e; [ "$ENGINE" = vllm ] || exit 0; cd /build; \
    if [ "$DEVICE" = cpu ]; then \
      torch=$(grep '^torch==' constraints.txt); \
      if [ -n "$TORCH_SHA256" ]; then \
        echo "$torch --hash=sha256:$TORCH_SHA256" > torch.txt; \
        pip install --no-deps --require-hashes -r torch.txt; \
      fi; \
      pip install "$torch"; \
    fi; \
    pip install --no-deps --require-hashes -r "requirements/vllm/$DEVICE.txt"

COPY . /build/
RUN pip install --no-deps /build


FROM ${PYTHON_IMAGE}

# Kernels are compiled where they run: by vLLM, and by a trainer on CUDA.
ARG ENGINE=transformers
ARG DEVICE=cpu
RUN if [ "$ENGINE $DEVICE" != "transformers cpu" ]; then \
      apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*; \
    fi

ENV PATH=/opt/onbeat/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The root is read-only in docker-compose.yml: what libraries keep for themselves goes to memory.
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib XDG_CACHE_HOME=/tmp/cache
# The processes need no root; the volumes of runs, backups and keys inherit owner and files from here.
RUN useradd --uid 10001 --create-home onbeat && install -d -o onbeat -g onbeat /app \
 && install -d -m 0700 -o onbeat -g onbeat /runs /keys /backups && install -m 0600 -o onbeat -g onbeat /dev/null /keys/keys
COPY --from=installed /opt/onbeat /opt/onbeat
COPY configs /app/configs

WORKDIR /app
USER onbeat
CMD ["onbeat", "--help"]
