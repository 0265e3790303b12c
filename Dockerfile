# CUDA, capability 8.0 and above. docs/scaling.md has the commands; not built where it was written.
FROM python:3.11-slim-bookworm
# a compiler for Triton's launchers; git for the commit in config.json, of a folder of another user
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /minimal-rl
COPY requirements.txt /tmp/
RUN pip install --no-cache-dir --requirement /tmp/requirements.txt
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /minimal-rl
