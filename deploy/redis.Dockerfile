# Redis with a user for each role and Onbeat's library of functions (docs/redis.md). Both are made from the sources here.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG REDIS_IMAGE=docker.io/library/redis:7.2-bookworm

FROM ${PYTHON_IMAGE} AS texts
COPY broker/__init__.py /build/broker/
COPY broker/connection/__init__.py broker/connection/bounds.py broker/connection/roles.py broker/connection/script_texts.py \
     /build/broker/connection/
COPY broker/scripts /build/broker/scripts
WORKDIR /build
RUN python -m broker.connection.script_texts /texts


FROM ${REDIS_IMAGE}
# The user `redis` of the official image, whose volumes belong to it already.
RUN install -d -o 999 -g 999 /data
COPY --from=texts /texts /usr/share/onbeat
COPY deploy/redis.conf deploy/redis-start.sh /usr/share/onbeat/
USER 999:999
ENTRYPOINT ["sh", "/usr/share/onbeat/redis-start.sh"]
CMD []
