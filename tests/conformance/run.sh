#!/usr/bin/env bash
# Serves the shipped checkpoint on a free port, asks it with clients of others, and ends it. BIN, CLIENTS, HARNESSES and
# VLLM: folders with the python of the service, of the clients, of those that bring torch, and of vLLM, which may be
# missing. EXAMPLES: made-up requests for each operation.
set -euo pipefail
export NO_PROXY=127.0.0.1 LITELLM_LOCAL_MODEL_COST_MAP=True HF_HUB_OFFLINE=1
log=$(mktemp)
"$BIN/python" -m serve --model loopwm/pretrained --port 0 > "$log" &
server=$!
trap 'kill $server 2> /dev/null || true; wait $server || true; rm -f "$log"' EXIT
until grep -q http "$log"; do kill -0 $server; sleep 0.2; done
LOOPWM_BASE=$(sed 's|.*\(http://[^/]*\).*|\1|' "$log")
LOOPWM_PYTHON=$(realpath -s "$BIN/python")
export LOOPWM_BASE LOOPWM_PYTHON
test_with() { "$1/python" -m pytest -q -m conformance --confcutdir=tests/conformance "tests/conformance/$2"; }
test_with "$CLIENTS" test_clients.py
test_with "$CLIENTS" test_mcp.py
test_with "$HARNESSES" test_harnesses.py
if [ -e "$VLLM/python" ]; then test_with "$VLLM" test_vllm_bench.py
else echo "left out: vllm bench serve, whose environment make test-vllm creates"; fi
"$CLIENTS/schemathesis" --config-file tests/conformance/schemathesis.toml run "$LOOPWM_BASE/openapi.json" \
  --max-examples "${EXAMPLES:-30}" --seed 0 --request-timeout 120
