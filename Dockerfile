# The service with the packaged checkpoint:  docker build -t loopwm .  &&  docker run -p 127.0.0.1:8000:8000 loopwm
# docs/production.md says what else there is to set.
FROM python:3.12-slim

# The processor's torch, without a gigabyte of CUDA. It changes less often than the project, so that it is a layer below.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url $TORCH_INDEX

WORKDIR /opt/loopwm
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY loopwm loopwm
COPY data_prep data_prep
COPY eval eval
COPY serve serve
RUN pip install --no-cache-dir -c constraints.txt .

RUN useradd --system --home-dir /var/lib/loopwm --create-home loopwm
USER loopwm
WORKDIR /var/lib/loopwm
VOLUME /var/lib/loopwm

EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["loopwm", "serve", "--host", "0.0.0.0", "--worlds-file", "/var/lib/loopwm/worlds.sqlite", "--access-log", "json"]
