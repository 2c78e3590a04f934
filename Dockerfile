# The service. On a CPU:
#   docker build -t diffscore .
# With CUDA (the runtime comes with torch's own packages; the host needs NVIDIA's driver and container toolkit):
#   docker build -t diffscore --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 .
# torch is the default build, with CUDA. TORCH_OPTIONS are options of pip for it, such as --index-url with the index of torch's
# builds for CPUs, a tenth of the size.
# The base has Python 3.11 or newer, or apt packages of it.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_OPTIONS=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/diffscore
ENV PATH=/opt/diffscore/bin:$PATH
RUN pip install --no-cache-dir torch==2.13.0 ${TORCH_OPTIONS} \
    && pip install --no-cache-dir 'setuptools>=77' wheel ninja
COPY . /src
RUN pip install --no-cache-dir --no-build-isolation '/src[serve]'

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 diffscore
COPY --from=build /opt/diffscore /opt/diffscore
ENV PATH=/opt/diffscore/bin:$PATH
USER diffscore
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready')"]
# In a container the service listens on all addresses, so that it needs a token: DIFFSCORE_TOKEN, or --token-file.
ENTRYPOINT ["diffscore", "serve", "--host", "0.0.0.0"]
