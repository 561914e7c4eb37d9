#!/usr/bin/env bash
# Serves the shipped checkpoint on a free port, asks it with clients of others, and ends it. BIN and CLIENTS: folders
# with the python of the service and of the clients. EXAMPLES: made-up requests for each operation.
set -euo pipefail
export NO_PROXY=127.0.0.1 LITELLM_LOCAL_MODEL_COST_MAP=True
log=$(mktemp)
"$BIN/python" -m serve --model loopwm/pretrained --port 0 > "$log" &
server=$!
trap 'kill $server 2> /dev/null || true; wait $server || true; rm -f "$log"' EXIT
until grep -q http "$log"; do kill -0 $server; sleep 0.2; done
LOOPWM_BASE=$(sed 's|.*\(http://[^/]*\).*|\1|' "$log")
export LOOPWM_BASE
"$CLIENTS/python" -m pytest -q -m conformance --confcutdir=tests/conformance tests/conformance
"$CLIENTS/schemathesis" --config-file tests/conformance/schemathesis.toml run "$LOOPWM_BASE/openapi.json" \
  --max-examples "${EXAMPLES:-30}" --seed 0
