# One image for every service of docker-compose.yml: the services differ by the module that `python -m` runs.
FROM docker.io/library/python:3.11-slim-bookworm AS installed

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# pycosat, which reasoning-gym needs, comes as C source only.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/onbeat
ENV PATH=/opt/onbeat/bin:$PATH

# torch comes first, from its pin, so that no other package's range can pull another build of it.
COPY constraints.txt pyproject.toml /build/
RUN pip install "$(grep '^torch==' /build/constraints.txt)"
# The other packages are a layer of their own: a changed source file installs none of them again.
RUN python -c 'import tomllib; print(*tomllib.load(open("/build/pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > /build/requirements.txt \
 && pip install -c /build/constraints.txt -r /build/requirements.txt

COPY . /build/
RUN pip install --no-deps /build


FROM docker.io/library/python:3.11-slim-bookworm

ENV PATH=/opt/onbeat/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The processes need no root; the volume of runs inherits the owner of its folder from here.
RUN useradd --uid 10001 --create-home onbeat && install -d -o onbeat -g onbeat /app /runs
COPY --from=installed /opt/onbeat /opt/onbeat
COPY configs /app/configs

WORKDIR /app
USER onbeat
CMD ["onbeat", "--help"]
