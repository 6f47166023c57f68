# p2ptrain in a container, of any role: docker run p2ptrain join --help
# The swarm of peers/compose.yaml is built from it.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# An index with CPU builds of torch (torch's install page names one), looked at beside pip's own, whose builds for Linux
# carry CUDA, which is gigabytes more. Empty: pip's own alone.
#   docker build --build-arg TORCH_INDEX=… .
ARG TORCH_INDEX=
# 1: the image is for GPUs. The build then fails if torch is a CPU build, as from an index or wheels that pip prefers.
#   docker build --build-arg GPU=1 -t p2ptrain:gpu .
ARG GPU=
WORKDIR /build
# Without pip: this environment is the whole of what the image below gets from here.
RUN python -m venv --without-pip /opt/p2ptrain
# First what p2ptrain depends on, for which the file with its version is enough: a layer that outlives changes of its
# code.
COPY setup.cfg pyproject.toml constraints.txt ./
COPY p2ptrain/__init__.py p2ptrain/__init__.py
RUN python -m pip --python /opt/p2ptrain/bin/python install --no-cache-dir --disable-pip-version-check \
        -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[all]' && \
    if [ -n "$GPU" ]; then /opt/p2ptrain/bin/python -c \
        'import sys, torch; sys.exit(None if torch.version.cuda or torch.version.hip else f"GPU=1, but pip chose torch {torch.__version__}, which knows no GPU: give TORCH_INDEX= an index with builds for GPUs")'; \
    fi
COPY . .
# A compiler for the native loops of rounds; it stays here.
RUN if ! command -v cc; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev; fi
RUN python -m pip --python /opt/p2ptrain/bin/python install --no-cache-dir --disable-pip-version-check \
        --no-deps --force-reinstall .
# What is there for those who build and test these packages: test programs of torch, the others' tests, and torch's C++
# headers, unless torch.compile may need them.
RUN cd /opt/p2ptrain/lib/python*/site-packages && \
    rm -rf torch/test && \
    if [ -z "$GPU" ]; then rm -rf torch/include; fi && \
    find torch/bin -type f ! -name torch_shm_manager -delete && \
    find . -type d -name tests -prune -exec rm -rf {} +

FROM ${PYTHON_IMAGE}
ARG GPU=
# With a compiler, for torch.compile.
RUN if [ -n "$GPU" ]; then apt-get update && apt-get install -y --no-install-recommends g++ && \
        rm -rf /var/lib/apt/lists/*; fi
# Volumes that are mounted on these directories take over their owner.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /state peer && \
    install --directory --owner peer --group peer /state /rendezvous
COPY --from=build /opt/p2ptrain /opt/p2ptrain
COPY peers/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/p2ptrain/bin:$PATH
USER peer
# Without --out or --identity, everything that a peer keeps is below the current directory.
WORKDIR /state
# Leave the run, write a checkpoint, exit: within 10 s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["p2ptrain"]
CMD ["--help"]
